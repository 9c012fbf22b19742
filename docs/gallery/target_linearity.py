"""Target linearity by layer of a network that tells even digits from odd, before and after training.

Run from the repository root: python docs/gallery/target_linearity.py. Writes docs/images/target-linearity.svg.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from gramscope.measures.linear_targets import TargetLinearityValue, layer_target_linearity
from gramscope.tasks import digits, mlp

OUT = Path(__file__).resolve().parents[1] / "images" / "target-linearity.svg"
Found = dict[str, TargetLinearityValue]


def train(epochs: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A network of four layers on the question whether a digit is even, and the data that it is measured on."""
    task = digits()
    even, even_test = (task.y % 2 == 0).float(), (task.y_test % 2 == 0).float()
    model = mlp((64, 64, 64, 64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(task.x), generator=rng).split(64):
            optimizer.zero_grad()
            (model(task.x[rows])[:, 0] - even[rows]).square().mean().backward()
            optimizer.step()
    return model, (task.x[:300], even[:300]), (task.x_test, even_test)


def measure(epochs: int) -> Found:
    model, (x, y), test = train(epochs)
    return layer_target_linearity(model, x, y, ["1", "3", "5", "6"], test=test, permutations=50, center=True)


def draw(start: Found, end: Found) -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "gramscope", "font.size": 9})
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained", sharey=True)
    places, names = range(len(end)), ["input", "hidden 1", "hidden 2", "hidden 3", "output"]
    for axis, found, title in ((axes[0], start, "before training"), (axes[1], end, "after 30 epochs")):
        values = list(found.values())
        null = [v.permuted for v in values]
        spread = [2 * v.permuted_std for v in values]
        axis.errorbar(places, null, spread, color="#999999", linewidth=1.2, capsize=2, label="permuted targets (2 std)")
        axis.plot(places, values, "o-", color="#1f5fa8", linewidth=1.4, markersize=4, label="target linearity")
        held = [v.held_out for v in values]
        axis.plot(places, held, "s--", color="#c8501e", linewidth=1.4, markersize=4, label="held out")
        axis.set(title=title, ylim=(-0.15, 1.05))
        axis.set_xticks(list(places), names, rotation=20)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.45), fontsize=8)
    return figure


def main() -> None:
    start, end = measure(0), measure(30)
    figure = draw(start, end)
    figure.savefig(OUT, metadata={"Date": None})
    for title, found in (("before", start), ("after", end)):
        for name, v in found.items():
            print(f"{title} {name}: {v:.3f}, null {v.null:.3f}, permuted {v.permuted:.3f}, held out {v.held_out:.3f}")


if __name__ == "__main__":
    main()
