"""Where is the nearly-kernel machine worse than the kernel alone? Trained networks, near and far targets, all widths.

python benchmarks/nearly_kernel_regime.py              calibration: seeds 0 to 2, widths 32, 128, 512; 3 minutes
python benchmarks/nearly_kernel_regime.py held-out     other seeds, widths 48 and 256, other targets

Each network (tanh, two hidden layers) is trained by gradient descent to the end and predicted at initialisation, by its
tangent kernel and by ``NearlyKernelRegressor``. How far the features move, ``feature_movement_``, is known before any
training: how well does it tell which prediction is worse? A line for each network, then hit rates.
"""

import math
import sys
import warnings
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from gramscope.kernels import TangentKernels, layer_rates
from gramscope.theory import NearlyKernelRegressor

POINTS = torch.tensor([[1.0, 0.2], [-0.6, 1.0], [0.3, -1.1], [-1.0, -0.4]], dtype=torch.float64)
SIGNS = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64)
CALIBRATION = {
    "wave": lambda x: torch.sin(2 * x[:, :1]) * torch.cos(x[:, 1:]),
    "product": lambda x: x[:, :1] * x[:, 1:] + 0.3,
    "signs": lambda x: SIGNS,
}
HELD_OUT = {"norm": lambda x: x.norm(dim=1, keepdim=True) - 1, "halves": lambda x: x[:, :1].sign()}
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)


def network(width, seed):
    torch.manual_seed(seed)
    layers = []
    for fan_in, fan_out in pairwise([2, width, width, 1]):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=math.sqrt(1.6 / fan_in))
        nn.init.normal_(linear.bias, std=math.sqrt(0.1))
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def train(model, y, rates, step, steps=5000):
    """Whether every residual came below 1e-5."""
    parameters = dict(model.named_parameters())
    for _ in range(steps):
        residual = model(POINTS) - y
        size = float(residual.detach().abs().max())
        if size < 1e-5 or not size < 1e4:
            return size < 1e-5
        gradients = torch.autograd.grad(0.5 * residual.square().sum(), list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                p.sub_(step * rates[name] * g)
    return False


def case(width, seed, y, x_test):
    """How far features move, and the errors of kernel and nearly-kernel machine; None if training did not end."""
    model = network(width, seed)
    rates = layer_rates(model, lambda_b=0.4, lambda_W=1.0)
    kernels = TangentKernels(model, metric=rates)
    step = 0.5 / float(np.linalg.eigvalsh(kernels(POINTS))[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit = NearlyKernelRegressor(kernels, algorithm="gradient-descent", step=step).fit(POINTS, y.numpy())
    nearly = fit.predict(x_test)
    linear = kernels.initial(x_test) + kernels(x_test, POINTS) @ fit.dual_coef_
    if not train(model, y, rates, step):
        return None
    real = model(x_test).detach().numpy()
    return fit.feature_movement_, *(float(np.sqrt(np.mean((guess - real) ** 2))) for guess in (linear, nearly))


def table(targets, widths, seeds):
    x_test = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = []
    for name, target in targets.items():
        for width in widths:
            for scale in SCALES:
                for seed in seeds:
                    found = case(width, seed, scale * target(POINTS), x_test)
                    shown = "not trained" if found is None else "  ".join(f"{value:.4f}" for value in found)
                    print(f"{name:8s} {width:4d} {scale:4.1f} {seed:3d}  {shown}", flush=True)
                    if found is not None:
                        rows.append((name, width, scale, *found))
    return rows


def hit_rates(rows, thresholds=(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)):
    """For each threshold: which share of the worse predictions is warned of, and which share of the better ones."""
    sizes, linear, nearly = (np.array([row[place] for row in rows]) for place in (3, 4, 5))
    worse = nearly > linear
    print(f"\n{len(rows)} networks, nearly-kernel machine worse in {worse.sum()}")
    print("threshold  warned  worse and warned  better and warned  right of all   rms ratio below  above")
    for threshold in thresholds:
        warned = sizes > threshold
        right = float(np.mean(warned == worse))
        ratio = [np.sqrt(np.mean(nearly[some] ** 2) / np.mean(linear[some] ** 2)) for some in (~warned, warned)]
        print(
            f"{threshold:9.2f}  {int(warned.sum()):6d}  {warned[worse].mean():16.2f}  {warned[~worse].mean():17.2f}  "
            f"{right:12.2f}  {ratio[0]:15.2f}  {ratio[1]:5.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["held-out"]:
        hit_rates(table(HELD_OUT, (48, 256), range(100, 104)))
    else:
        hit_rates(table(CALIBRATION, (32, 128, 512), range(3)))
