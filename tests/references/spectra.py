"""Slow and plain: spectra, tail fits and alternatives from the formulas, one candidate and one point at a time."""

import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from torch import Tensor


def squared_singular_values(weight: Tensor) -> np.ndarray:
    """λ of one matrix by an SVD, ascending."""
    return np.sort(np.linalg.svd(weight.detach().double().numpy(), compute_uv=False) ** 2)


def tail_fit(eigenvalues: np.ndarray, cut: float, few: int = 0) -> dict[str, float]:
    """Every λ above the cut but the greatest as xmin; below ``few`` of them by WeightWatcher's small-sample rule."""
    x = np.sort(eigenvalues[eigenvalues > cut])
    best: dict[str, float] = {"D": math.inf}
    for i in range(len(x) - 1):
        tail = x[i:]
        n = len(tail)
        small = len(x) < few
        if small and n < min(8, len(x)):
            continue
        total = sum(math.log(value / x[i]) for value in tail)
        if total <= 0:
            continue
        alpha = 1 + (n - 1 if small else n) / total
        distance = max(abs(1 - (value / x[i]) ** (1 - alpha) - k / n) for k, value in enumerate(tail))
        if distance < best["D"]:
            best = {"alpha": alpha, "D": distance, "xmin": x[i], "n_tail": int((eigenvalues >= x[i]).sum())}
            best["sigma"] = (alpha - 1) / math.sqrt(n)
    return best


def truncated_log_likelihood(tail: np.ndarray, xmin: float, alpha: float, rate: float) -> float:
    """``Σ ln p`` of ``p ∝ x^{-α} e^{-rate x}`` on [xmin, ∞), its normaliser by adaptive quadrature."""
    norm, _ = quad(lambda t: math.exp(-alpha * math.log(t) - rate * xmin * (t - 1)), 1, np.inf, epsabs=0, limit=200)
    log_norm = math.log(norm) + (1 - alpha) * math.log(xmin) - rate * xmin
    return float(np.sum(-alpha * np.log(tail) - rate * tail) - len(tail) * log_norm)


def truncated_fit(tail: np.ndarray, xmin: float) -> tuple[float, float, float]:
    """The greatest likelihood over α ≥ 0 and rate ≥ 0 from several starts, by a search without gradients."""

    def loss(point: np.ndarray) -> float:
        return -truncated_log_likelihood(tail, xmin, abs(point[0]), math.exp(point[1])) / len(tail)

    scale = 1 / (tail.mean() - xmin)
    power = 1 + 1 / np.mean(np.log(tail / xmin))
    starts = [(0.1, math.log(scale)), (power, math.log(scale) - 4), (power / 2, math.log(scale) - 1)]
    found = [minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}) for start in starts]
    best = min(found, key=lambda result: result.fun)
    return abs(best.x[0]), math.exp(best.x[1]), -best.fun * len(tail)


def marchenko_pastur_cdf(value: float, long: int, short: int, sigma: float) -> float:
    """The law's distribution function by quadrature of its density."""
    low, high = (sigma * (math.sqrt(long) - math.sqrt(short))) ** 2, (sigma * (math.sqrt(long) + math.sqrt(short))) ** 2

    def density(x: float) -> float:
        return math.sqrt(max((high - x) * (x - low), 0.0)) / (2 * math.pi * sigma**2 * short * x)

    return quad(density, low, min(max(value, low), high), limit=400)[0]


def entropy(eigenvalues: np.ndarray, rank: int) -> float:
    total = sum(eigenvalues)
    return -sum(p * math.log(p) for p in (value / total for value in eigenvalues) if p > 0) / math.log(rank)


def block_diagonal(weight: Tensor, groups: int) -> Tensor:
    """A grouped convolution's weight (out, in/groups, positions) as one matrix (out, in · positions) with zeros."""
    out, fan, positions = weight.shape
    matrix = torch.zeros(out, groups * fan * positions, dtype=weight.dtype)
    for row in range(out):
        start = (row // (out // groups)) * fan * positions
        matrix[row, start : start + fan * positions] = weight[row].reshape(-1)
    return matrix
