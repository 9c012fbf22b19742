"""CKA between the layers of trained networks, and why the debiased, one-pass form is the default there.

Run: python docs/gallery/similarity.py (about 15 s on one core); writes docs/images/similarity.svg.
"""

import sys
from pathlib import Path

import matplotlib
import torch

import gramscope as gs
from gramscope.tasks import digits, mlp

matplotlib.use("Agg")
from matplotlib import pyplot

LAYERS = [str(place) for place in range(1, 12, 2)]


def trained(seed: int) -> torch.nn.Sequential:
    task = digits(0)
    model = mlp((64, *[64] * 6, 10), seed=seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(600):
        batch = slice(step * 100 % 1400, step * 100 % 1400 + 100)
        loss = torch.nn.functional.cross_entropy(model(task.x[batch]), task.y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def by_number_of_examples() -> tuple[list[int], dict[str, list[float]]]:
    """CKA of independent features of width 200 and 100: the true value is 0."""
    numbers, found = [10, 20, 50, 100, 200, 500, 1000, 2000], {"biased": [], "debiased": []}
    for n in numbers:
        rng = torch.Generator().manual_seed(n)
        x, y = torch.randn(n, 200, generator=rng), torch.randn(n, 100, generator=rng)
        found["biased"].append(gs.measures.cka(x, y))
        found["debiased"].append(gs.measures.cka(x, y, debiased=True))
    return numbers, found


def main(out: Path) -> None:
    task = digits(0)
    first, second = trained(1), trained(2)
    own = gs.measures.layer_similarity(first, task.x_test.split(100), LAYERS)
    other = gs.measures.layer_similarity(first, task.x_test.split(100), LAYERS, other=second)
    pyplot.rcParams.update({"svg.hashsalt": "gramscope", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained", width_ratios=[1, 1, 1.25])
    for axis, matrix, title in ((axes[0], own, "layers of one network"), (axes[1], other, "two networks, two seeds")):
        # Squares as paths, not as an embedded bitmap, keep the file small and sharp.
        image = axis.pcolormesh(matrix.values.numpy(), vmin=0, vmax=1, cmap="viridis")
        axis.set(title=title, xlabel="hidden layer", ylabel="hidden layer", aspect="equal")
        places = [place + 0.5 for place in range(len(LAYERS))]
        axis.set_xticks(places, range(1, len(LAYERS) + 1))
        axis.set_yticks(places, range(1, len(LAYERS) + 1))
    figure.colorbar(image, ax=axes[1], shrink=0.8, label="debiased CKA")
    numbers, found = by_number_of_examples()
    axes[2].semilogx(numbers, found["biased"], color="#b2452f", marker=".", label="biased")
    axes[2].semilogx(numbers, found["debiased"], color="#2f5fb2", marker=".", label="debiased")
    axes[2].axhline(0, color="#999999", linewidth=0.8)
    axes[2].set(title="independent features: the true value is 0", xlabel="examples", ylabel="CKA")
    axes[2].spines[["top", "right"]].set_visible(False)
    axes[2].legend(frameon=False)
    print(own.to_dataframe().round(2), other.to_dataframe().round(2), found, sep="\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images" / "similarity.svg")
