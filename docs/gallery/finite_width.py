"""Pictures of docs/finite-width.md: the kernel's flow, and the growth of the 1/n tensors with theory against networks.

python docs/gallery/finite_width.py        writes docs/images/finite-width*.svg
"""

from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from gramscope.theory import (
    FiniteWidthMLP,
    critical_point,
    ensemble,
    equivalent_learning_rates,
    plot_kernel_flow,
    plot_strengths,
)

IMAGES = Path(__file__).parents[1] / "images"
X = torch.tensor([[1.0, -0.5]], dtype=torch.float64)


def save(figure: Figure, name: str) -> None:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # text as text: a third of the size
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def kernel_flow() -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("relu", "sin", "gelu"), strict=True):
        plot_kernel_flow(name, depth=30, axes=axes, starts=(0.5, 4.0, 8.0) if name == "gelu" else (0.3, 1.0, 3.0))
    save(figure, "finite-width-kernel")


def growth() -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    depth, name = 30, "sin"
    point = critical_point(name)
    biases, weights = equivalent_learning_rates(name, depth)
    mlp = FiniteWidthMLP(100, name, point.C_b, point.C_W, biases, weights, depth=depth)
    plot_strengths(mlp.flow(X), axes=left)
    flow = FiniteWidthMLP(32, "tanh", 0.1, 1.6, 0.4, 1.0, depth=5).flow(X)
    report = ensemble(flow, width=[12, 24], count=600)
    for place, tensor in enumerate("VFPQ"):
        layers = list(range(2, 6))
        right.plot(
            layers, [getattr(flow[layer], tensor).item() for layer in layers], color=f"C{place}", label=tensor, lw=1.4
        )
        found = [report.estimates[layer, tensor] for layer in layers]
        right.errorbar(
            layers,
            [e.value.item() for e in found],
            [e.error.item() for e in found],
            fmt="o",
            color=f"C{place}",
            ms=3.5,
            capsize=2,
        )
    right.set(xlabel="layer l", ylabel="tensor", title="tanh: theory (lines), networks (dots)", xticks=layers)
    right.legend(fontsize="small")
    save(figure, "finite-width-growth")


if __name__ == "__main__":
    kernel_flow()
    growth()
