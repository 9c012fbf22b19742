"""Expectations of four Gaussian signs for whole tensors of correlation matrices."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_PAIRS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (1, 2, 0, 3), (1, 3, 0, 2), (2, 3, 0, 1))


def _double_exponential(step: float = 0.055, reach: float = 3.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes t in (0, 1), 1 - t, and weights of the tanh-sinh rule, which takes singular ends in its stride."""
    x = np.arange(-math.floor(reach / step), math.floor(reach / step) + 1) * step
    exponent = np.pi * np.sinh(x)
    t, left = 1 / (1 + np.exp(-exponent)), 1 / (1 + np.exp(exponent))
    return t, left, step * np.pi * np.cosh(x) * t * left


_T, _T_LEFT, _T_WEIGHTS = _double_exponential()


def four_signs_of_tables(correlation: Float[Tensor, "*batch 4 4"]) -> Float[Tensor, "*batch"]:
    """E[sgn z₁ sgn z₂ sgn z₃ sgn z₄] for correlation matrices, to about 1e-13: Plackett's integral on fixed nodes."""
    # Variables are turned to the side of the first, so that a correlation close to -1 is one close to 1.
    turn = torch.where(correlation[..., 0, :] < 0, -1.0, 1.0).to(correlation.dtype)
    turned = correlation * turn[..., :, None] * turn[..., None, :]
    t, left, weights = (correlation.new_tensor(v) for v in (_T, _T_LEFT, _T_WEIGHTS))
    # Along the path the correlations are t ρ; all is written in 1 - t ρ, which keeps its digits where ρ is close to 1.
    gaps = left + t * (1 - turned)[..., None]
    total = torch.zeros_like(gaps[..., 0, 0, :])
    for i, j, k, m in _PAIRS:
        det = (gaps[..., i, j, :] * (2 - gaps[..., i, j, :])).clamp(min=1e-300)
        var_k, var_m, cov = (_minor(gaps, i, j, *rest) for rest in ((k, k), (m, m), (k, m)))
        rho = (cov / (var_k.clamp(min=1e-300).sqrt() * var_m.clamp(min=1e-300).sqrt())).clamp(-1, 1)
        total = total + turned[..., i, j, None] / det.sqrt() * torch.asin(rho)
    return (4 / math.pi**2) * (total @ weights) * turn.prod(-1)


def _minor(gaps: Tensor, i: int, j: int, k: int, m: int) -> Tensor:
    """Determinant of the correlations of (i, j, k) with (i, j, m): det × their covariance given z_i = z_j = 0."""
    ij, ik, jk, im, jm = (gaps[..., a, b, :] for a, b in ((i, j), (i, k), (j, k), (i, m), (j, m)))
    km = gaps[..., k, m, :] if k != m else torch.zeros_like(ij)
    across, right, down = ik - km + im, ij - jm + im, ik - jk + ij
    return 2 * ij * across - right * down + ij * (right * ik - ij * across) - im * ij * (2 * ik - down)
