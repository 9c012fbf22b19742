"""The Swiss roll unrolled by its virtual update, and how well three optimisers keep to what the features ask for.

Run from the repository root: python docs/gallery/feature_learning.py. Writes docs/images/feature-learning.svg.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from gramscope.measures.gram_tracker import GramTracker
from gramscope.measures.linear_targets import target_linearity
from gramscope.measures.virtual_updates import virtual_update
from gramscope.tasks.synthetic import SwissRoll, swiss_roll

OUT = Path(__file__).resolve().parents[1] / "images" / "feature-learning.svg"
STEPS = 100
OPTIMISERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD, momentum .9": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.001),
}


def train(roll: SwissRoll, optimiser: str) -> tuple[Tensor, list[float], list[float]]:
    """``Σ_t ∇_X L`` over the steps, and two cosines after each step: with the step taken, with the gradient alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 1)).double()
    optimizer = OPTIMISERS[optimiser](model.parameters())
    asked = torch.zeros_like(roll.x)
    taken, bent = [], []
    with GramTracker(model, optimizer, "0.weight") as tracker:
        for _ in range(STEPS):
            x = roll.x.clone().requires_grad_()
            optimizer.zero_grad()
            ((model(x) - roll.y).square().mean() / 2).backward()
            asked += x.grad
            optimizer.step()
            change = tracker.compute()["0.weight"]
            taken.append(change.cosine)
            bent.append(change.gradient_cosine)
    return asked, taken, bent


def draw(roll: SwissRoll, moved: Tensor, cosines: dict[str, tuple[list[float], list[float]]]) -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "gramscope", "font.size": 9})
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained")
    some = slice(0, 90)
    for axis, points, title in ((axes[0], roll.x, "input X"), (axes[1], moved, "virtual input X - 700 Σ∇")):
        tl = target_linearity(points, roll.y)
        axis.scatter(points[some, 0], points[some, 2], c=roll.y[some, 0], s=9, cmap="viridis", linewidths=0)
        axis.set(title=f"{title}\ntarget linearity {tl:.2f}", xticks=[], yticks=[])
        axis.spines[["top", "right", "left", "bottom"]].set_color("#bbbbbb")
    steps = list(range(1, STEPS + 1, 2))
    for (name, (taken, bent)), colour in zip(cosines.items(), ("#1f5fa8", "#2f8f4e", "#c8501e"), strict=True):
        axes[2].semilogy(steps, [1 - c for c in taken[::2]], color=colour, linewidth=1.4, label=name)
        axes[2].semilogy(steps, [1 - c for c in bent[::2]], color=colour, linewidth=1.4, linestyle=":")
    axes[2].set(title="1 - cosine of ΔWᵀW with the steps taken\n(dotted: with the gradients alone)", xlabel="step")
    axes[2].set(ylim=(1e-9, 30))
    axes[2].legend(frameon=False, loc="upper right", ncols=3, fontsize=7, handlelength=1, columnspacing=1)
    axes[2].spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    roll = swiss_roll(500)
    found = {name: train(roll, name) for name in OPTIMISERS}
    moved = virtual_update(roll.x, found["SGD"][0], 700.0)
    figure = draw(roll, moved, {name: (taken, bent) for name, (_, taken, bent) in found.items()})
    figure.savefig(OUT, metadata={"Date": None})
    for name, (_, taken, bent) in found.items():
        print(f"{name}: cosine with the step taken {taken[-1]:.6f}, with the gradient alone {bent[-1]:.6f}")


if __name__ == "__main__":
    main()
