"""Trained networks predicted from their initialisation: by the tangent kernel, and with the dNTK.

python docs/gallery/nearly_kernel.py         about three minutes; writes docs/images/nearly-kernel.svg, prints a table
"""

import math
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

from gramscope.kernels.learning_rates import layer_rates
from gramscope.kernels.tangent_kernels import TangentKernels
from gramscope.theory import NearlyKernelRegressor, QuadraticModel

BLUE, ORANGE, GREEN, PURPLE = "#2b6cb0", "#dd6b20", "#2f855a", "#6b46c1"
X = torch.tensor([[1.0, 0.2], [-0.6, 1.0], [0.3, -1.1], [-1.0, -0.4]], dtype=torch.float64)
Y = torch.sin(2 * X[:, :1]) * torch.cos(X[:, 1:])


def network(width, seed):
    """tanh, two hidden layers, C_b = 0.1, C_W = 1.6."""
    torch.manual_seed(seed)
    layers = []
    for fan_in, fan_out in pairwise([2, width, width, 1]):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=math.sqrt(1.6 / fan_in))
        nn.init.normal_(linear.bias, std=math.sqrt(0.1))
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def train(model, rates, step):
    """Full-batch gradient descent until every residual is below 1e-7."""
    parameters = dict(model.named_parameters())
    while True:
        residual = model(X) - Y
        if residual.abs().max() < 1e-7:
            return
        gradients = torch.autograd.grad(0.5 * residual.square().sum(), list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                p.sub_(step * rates[name] * g)


def errors(width, seeds, x_test):
    """Root-mean-square errors on the test inputs, (seeds, 2): tangent kernel, nearly-kernel."""
    rows = []
    for seed in range(seeds):
        model = network(width, seed)
        rates = layer_rates(model, lambda_b=0.4, lambda_W=1.0)
        kernels = TangentKernels(model, metric=rates)
        step = 1.0 / float(np.linalg.eigvalsh(kernels(X))[-1])
        fit = NearlyKernelRegressor(kernels, algorithm="gradient-descent", step=step).fit(X, Y.numpy())
        nearly = fit.predict(x_test)
        linear = kernels.initial(x_test) + kernels(x_test, X) @ fit.dual_coef_
        train(model, rates, step)
        real = model(x_test).detach().numpy()
        rows.append([np.sqrt(np.mean((guess - real) ** 2)) for guess in (linear, nearly)])
    return np.array(rows)


def widths(axis, seeds):
    x_test = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = [32, 64, 128, 256, 512]
    table = np.array([errors(width, seeds, x_test) for width in sizes])
    means, spread = table.mean(1), table.std(1) / math.sqrt(seeds)
    for column, (colour, label) in enumerate(((BLUE, "tangent kernel"), (GREEN, "with the dNTK"))):
        axis.errorbar(
            sizes, means[:, column], spread[:, column], color=colour, marker="o", markersize=4, capsize=2, label=label
        )
    for size, mean, error in zip(sizes, means, spread, strict=True):
        print(f"n = {size}: linear {mean[0]:.4f} ± {error[0]:.4f}, nearly-kernel {mean[1]:.4f} ± {error[1]:.4f}")
    print("slopes in n:", np.polyfit(np.log(sizes), np.log(means), 1)[0].round(2))
    axis.set(xscale="log", yscale="log", xlabel="width n", ylabel="rms error of the trained output")
    axis.set(title="Real training, predicted at initialisation")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)


def slopes(axis):
    """Error against each algorithm run on a quadratic model, over ε."""
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(3, 24)), rng.normal(size=(3, 24, 24)) / 24**0.5
    x, x_test, y = rng.normal(size=(4, 3)), rng.normal(size=(10, 3)), rng.normal(size=(4, 1))

    def psi(x):
        bent = np.sin(np.einsum("nd,dfg->nfg", x, B))
        return (bent + bent.transpose(0, 2, 1)) / 2

    def phi(x):
        return np.cos(x @ A)

    epsilons = [0.02 / 2**k for k in range(6)]
    step = 1.5 / np.linalg.eigvalsh(phi(x) @ phi(x).T)[-1]
    colours = {"direct": BLUE, "gradient-descent": ORANGE, "gradient-flow": PURPLE, "minimum-norm": GREEN}
    for algorithm, colour in colours.items():
        size = step if algorithm == "gradient-descent" else None
        gaps, kernel = [], []
        for epsilon in epsilons:
            model = QuadraticModel(phi, psi, epsilon)
            exact = model(x_test, model.train(x, y, algorithm, size))
            nearly = NearlyKernelRegressor(model.kernel, model.meta_kernel, algorithm, size).fit(x, y)
            gaps.append(np.linalg.norm(nearly.predict(x_test) - exact))
            kernel.append(np.linalg.norm(model.kernel(x_test, x) @ nearly.dual_coef_ - exact))
        print(algorithm, "slope", round(math.log2(gaps[-2] / gaps[-1]), 3))
        axis.loglog(epsilons, gaps, color=colour, marker="o", markersize=3, label=algorithm)
        axis.loglog(epsilons, kernel, "--", color=colour, linewidth=0.8)
    axis.set(xlabel="ε", ylabel="error of the prediction", title="Quadratic model (dashed: kernel alone)")
    axis.legend(frameon=False, fontsize=8)


def main(seeds):
    mpl.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "gramscope"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.5), layout="constrained")
    slopes(left)
    widths(right, seeds)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parents[1] / "images" / "nearly-kernel.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
