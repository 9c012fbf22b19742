"""Two pictures of one gradient step: what the dNTK predicts of it, and what kinks add.

python docs/gallery/dntk.py          writes docs/images/dntk.svg and prints the figures of the page
"""

import math
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import nn

from gramscope.kernels.crossings import ntk_step

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#4a5568"


def slopes(axis):
    """Errors of one step of a tanh network against its size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    rates = [2.0**-k for k in range(4, 13)]
    kernel_zero, kernel, first, second = [], [], [], []
    for lr in rates:
        step = ntk_step(model, x, lambda f: 0.5 * (f - y).square().sum(), lr)
        kernel_zero.append(float(step.measured.norm()))
        kernel.append(float((step.measured - step.predicted).norm()))
        first.append(float((step.outputs_measured - step.outputs_linear).norm()))
        second.append(float((step.outputs_measured - step.outputs_quadratic).norm()))
    for values, colour, style, label in (
        (kernel_zero, BLUE, "--", "kernel, frozen (slope 1)"),
        (kernel, BLUE, "-", "kernel, dNTK (slope 2)"),
        (first, ORANGE, "--", "outputs, NTK (slope 2)"),
        (second, ORANGE, "-", "outputs, with curvature (slope 3)"),
    ):
        axis.loglog(rates, values, style, color=colour, marker="o", markersize=3, label=label)
    for name, values in (("kernel", kernel), ("outputs", second)):
        print(name, "slope", round(math.log2(values[-2] / values[-1]), 3))
    axis.set(xlabel="step η", ylabel="error of the prediction", title="One step of a tanh network")
    axis.legend(frameon=False, fontsize=8)


def one_hidden_layer(width, count, seed, lambda_b=0.3, C_W=2.0, lr=1.0):
    """Measured change, dNTK and crossing part of ReLU networks with one hidden layer at x = (1, -1/2), target 0.

    H = λ_b + (1/n) Σ s² + Θ Σ W² s'²: what ``ntk_step`` gives for such a network (tests/kernels/test_crossings.py),
    here for many networks at once.
    """
    rng = torch.Generator().manual_seed(seed)
    square = 0.625
    theta, K = lambda_b + square, C_W * square
    z = math.sqrt(K) * torch.randn(count, width, generator=rng, dtype=torch.float64)
    W = math.sqrt(C_W / width) * torch.randn(count, width, generator=rng, dtype=torch.float64)
    mask = (z > 0).double()
    f = (W * z * mask).sum(1, keepdim=True)
    z1, W1 = z - lr * f * theta * W * mask, W - lr / width * f * z * mask
    new = (z1 > 0).double()

    def kernel(z, W, mask):
        return ((z * mask) ** 2).sum(1) / width + theta * (W**2 * mask).sum(1)

    measured = kernel(z1, W1, new) - kernel(z, W, mask)
    crossing = kernel(z1, W1, new) - kernel(z1, W1, mask)
    predicted = -4 * lr / width * theta * f[:, 0] ** 2
    formula = -lr * theta**2 * C_W**1.5 * math.sqrt(2 * K / math.pi) / (math.pi * math.sqrt(K * width))
    return measured, predicted, crossing, formula, -4 * lr / width * theta * K


def crossings(axis):
    widths = [32, 64, 128, 256, 512, 1024, 2048]
    rows = []
    for width in widths:
        measured, predicted, crossing, formula, mean = one_hidden_layer(
            width, 20_000 if width < 2000 else 10_000, width
        )
        error = float(measured.std()) / math.sqrt(len(measured))
        rows.append((float(measured.mean()), mean, mean + formula))
        print(
            f"n = {width}: measured {rows[-1][0]:.4f} ± {error:.4f}, dNTK {mean:.4f} (sampled {predicted.mean():.4f}), "
            f"crossings {crossing.mean():.4f} (formula {formula:.4f}), both {mean + formula:.4f}"
        )
    measured, dntk, both = zip(*rows, strict=True)
    axis.loglog(widths, [-v for v in measured], "o", color=GREY, label="measured, mean over networks")
    axis.loglog(widths, [-v for v in dntk], "--", color=BLUE, label="dNTK, 1/n")
    axis.loglog(widths, [-v for v in both], "-", color=GREEN, label="dNTK and crossings, n$^{-1/2}$")
    axis.set(xlabel="width n", ylabel="fall of the mean kernel in one step", title="One step of a ReLU network, η = 1")
    axis.legend(frameon=False, fontsize=8)


def main():
    mpl.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "gramscope"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.5), layout="constrained")
    slopes(left)
    crossings(right)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    out = Path(__file__).parents[1] / "images" / "dntk.svg"
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
