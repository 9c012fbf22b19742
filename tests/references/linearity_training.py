"""Penalty, rows of weights, linearised training and path linearity, written out slowly in float64."""

import numpy as np
import torch
from torch import Tensor


def penalty(features: np.ndarray, targets: np.ndarray, ridge: float, weights: np.ndarray | None = None) -> float:
    """1 - TL with an offset and a ridge relative to the mean variance; examples weigh ``weights`` (sum 1)."""
    w = np.full(len(features), 1 / len(features)) if weights is None else weights
    h, y = features - w @ features, targets - w @ targets
    hh = sum(w[i] * np.outer(h[i], h[i]) for i in range(len(h)))
    hy = sum(w[i] * np.outer(h[i], y[i]) for i in range(len(h)))
    ridged = hh + ridge * np.trace(hh) / len(hh) * np.eye(len(hh))
    return float(1 - np.trace(hy.T @ np.linalg.inv(ridged) @ hy) / sum(w[i] * y[i] @ y[i] for i in range(len(y))))


def finite_difference(f, at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """∂f/∂at by central differences."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (f(up) - f(down)) / (2 * step)
    return gradient


def patches(x: Tensor, kernel: int, stride: int = 1, padding: int = 0) -> Tensor:
    """(n, positions, channels · kernel²), one patch at a time."""
    x = torch.nn.functional.pad(x, [padding] * 4)
    n, _, height, width = x.shape
    found = [
        x[:, :, i : i + kernel, j : j + kernel].reshape(n, -1)
        for i in range(0, height - kernel + 1, stride)
        for j in range(0, width - kernel + 1, stride)
    ]
    return torch.stack(found, 1)


def projected_share(features: np.ndarray, targets: np.ndarray) -> float:
    """tr(Yᵀ P_H Y) / tr(YᵀY), Y centred, by a pseudo-inverse."""
    y = targets - targets.mean(0)
    return float(np.sum(y * (features @ np.linalg.pinv(features) @ y)) / np.sum(y * y))


def linearised_outputs(function, theta: Tensor, x: Tensor, every: Tensor, residual, lr: float, steps: int) -> Tensor:
    """Gradient descent in the parameters of ``f(θ_0) + J (θ - θ_0)``; ``function(θ, x)`` is the network."""
    jacobian = torch.func.jacrev(lambda t: function(t, every))(theta)
    start, n = function(theta, every).detach(), len(x)
    change = torch.zeros_like(theta)
    for _ in range(steps):
        f = start + jacobian @ change
        change = change - lr * torch.einsum("nc,ncp->p", residual(f[:n]), jacobian[:n])
    return start + jacobian @ change


def path_linearity(path: np.ndarray) -> float:
    """R² of a regression of the points on t, with an offset."""
    t = np.linspace(0, 1, len(path))
    design = np.column_stack([t, np.ones(len(t))])
    fit = design @ np.linalg.lstsq(design, path, rcond=None)[0]
    return float(1 - np.sum((path - fit) ** 2) / np.sum((path - path.mean(0)) ** 2))
