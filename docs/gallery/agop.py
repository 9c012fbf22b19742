"""WᵀW, the square root of the AGOP and their correlation while a network finds the two inputs that matter.

Run from the repository root: python docs/gallery/agop.py. Writes docs/images/agop.svg.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from gramscope.measures.ansatz import matrix_power, neural_feature_ansatz
from gramscope.measures.gradient_outer_product import layer_agop

OUT = Path(__file__).resolve().parents[1] / "images" / "agop.svg"
STEPS, EVERY = 1200, 40


def train() -> tuple[Tensor, Tensor, list[int], dict[str, list[float]]]:
    """The two matrices of the first layer at the end, and the correlations of two layers on the way."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 10, generator=rng)
    y = x[:, :1] * x[:, 1:2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    with torch.no_grad():
        model[0].weight.mul_(0.2)  # a small start: what the first layer holds at the end, it has learnt
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3)
    steps: list[int] = []
    correlations: dict[str, list[float]] = {"0.weight": [], "2.weight": []}
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            steps.append(step)
            for name, value in neural_feature_ansatz(model, x[:300]).items():
                correlations[name].append(value)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    found = layer_agop(model, x)
    return found.grams["0.weight"][0], matrix_power(found["0.weight"][0], 0.5), steps, correlations


def draw(gram: Tensor, root: Tensor, steps: list[int], correlations: dict[str, list[float]]) -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "gramscope", "font.size": 9})
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained")
    for axis, matrix, title in ((axes[0], gram, "WᵀW of the first layer"), (axes[1], root, "AGOP^½ at its input")):
        size = float(matrix.abs().max())
        # Squares and not an image: a picture inside the SVG would be a bitmap.
        axis.pcolormesh(matrix.flip(0), cmap="RdBu_r", vmin=-size, vmax=size)
        axis.set(title=title, aspect="equal", xticks=[0.5, 1.5], yticks=[9.5, 8.5])
        axis.set_xticklabels(["x₁", "x₂"])
        axis.set_yticklabels(["x₁", "x₂"])
    for (name, values), colour in zip(correlations.items(), ("#1f5fa8", "#c8501e"), strict=True):
        axes[2].plot(steps, values, color=colour, linewidth=1.4, label=name)
    axes[2].set(title="correlation (y = x₁x₂, 10 inputs)", xlabel="step", ylim=(0, 1.03))
    axes[2].legend(frameon=False, loc="lower right")
    axes[2].spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    gram, root, steps, correlations = train()
    figure = draw(gram, root, steps, correlations)
    figure.savefig(OUT, metadata={"Date": None})
    for name, values in correlations.items():
        print(f"{name}: correlation {values[0]:.3f} at the start, {values[-1]:.3f} at the end")


if __name__ == "__main__":
    main()
