"""Moments of Gaussian variables and their signs: E[z^p ∏ sgn(z_i)], for up to four variables.

Stein's lemma, E[z_i G] = Σ_j C_ij E[∂_j G] with ∂ sgn(z) = 2δ(z), lowers the powers one at a time; what is left is
E[sgn sgn] = (2/π) arcsin ρ and E[sgn sgn sgn sgn], which has no elementary form. Plackett's identity,
∂/∂ρ_ij E[∏ sgn] = 4 E[δ_i δ_j sgn_k sgn_l], makes it an integral over one variable of arcsines.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.theory.close_orthants import four_close_signs
from gramscope.theory.decimal_arithmetic import NARROW, Decimals, Doubles, Number

_PAIRS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (1, 2, 0, 3), (1, 3, 0, 2), (2, 3, 0, 1))
_CHOICES = tuple(itertools.combinations(range(4), 2))


def _double_exponential(step: float = 0.055, reach: float = 3.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes t in (0, 1), 1 - t, and weights of the tanh-sinh rule, which takes singular ends in its stride."""
    x = np.arange(-math.floor(reach / step), math.floor(reach / step) + 1) * step
    exponent = np.pi * np.sinh(x)
    t, left = 1 / (1 + np.exp(-exponent)), 1 / (1 + np.exp(exponent))
    return t, left, step * np.pi * np.cosh(x) * t * left


_T, _T_LEFT, _T_WEIGHTS = _double_exponential()


def four_signs(correlation: Float[Tensor, "*batch 4 4"]) -> Float[Tensor, "*batch"]:
    """E[sgn z₁ sgn z₂ sgn z₃ sgn z₄] for correlation matrices, to about 1e-13.

    >>> float(four_signs(torch.eye(4, dtype=torch.float64)))
    0.0
    >>> half = torch.eye(4, dtype=torch.float64)
    >>> half[0, 1] = half[1, 0] = half[2, 3] = half[3, 2] = 0.5   # two independent pairs: ((2/π) arcsin ½)² = 1/9
    >>> round(float(four_signs(half)), 12)
    0.111111111111
    """
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


Covariance = tuple[tuple[Number, ...], ...]


class SignMoments:
    """E[∏ z_i^{p_i} ∏_{i in signs} sgn z_i] of one Gaussian vector of at most four variables, remembered.

    In floats, or in decimals where variables lie at small angles.

    >>> moments = SignMoments([[1.0, 0.0], [0.0, 4.0]])
    >>> round(moments((1, 1), (0, 1)), 12) == round(4 / math.pi, 12)    # E|z₁| E|z₂| = (2/π) · 2
    True
    """

    def __init__(self, covariance: Sequence[Sequence[Number]], numbers: Doubles | None = None) -> None:
        self._numbers = numbers or Doubles()
        self._covariance: Covariance = tuple(tuple(self._numbers.number(v) for v in row) for row in covariance)
        self._scales = tuple(row[i] for i, row in enumerate(self._covariance))
        self._seen: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], Number] = {}
        self._conditioned: dict[tuple[int, ...], Covariance] = {(): self._covariance}

    def __call__(self, powers: tuple[int, ...], signs: tuple[int, ...], at_zero: tuple[int, ...] = ()) -> Number:
        """The moment given that the variables ``at_zero`` are 0 (a density of δ functions is the caller's)."""
        if any(powers[j] for j in at_zero) or (sum(powers) + len(signs)) % 2:
            return self._numbers.number(0)
        turned, signs = self._cancelled(signs, at_zero)
        key = (powers, signs, at_zero)
        if key not in self._seen:
            self._seen[key] = self._lowered(*key) if sum(powers) else self._signs_alone(signs, at_zero)
        return turned * self._seen[key]

    def _cancelled(self, signs: tuple[int, ...], at_zero: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Signs of variables on one line multiply to ±1; left in, their δ functions would meet at one point."""
        covariance = self.conditioned(at_zero)
        for j, k in itertools.combinations(signs, 2):
            product = covariance[j][j] * covariance[k][k]
            if product > 0 and 1 - covariance[j][k] ** 2 / product <= self._least(j, k, at_zero):
                turned, rest = self._cancelled(tuple(i for i in signs if i not in (j, k)), at_zero)
                return (turned if covariance[j][k] > 0 else -turned), rest
        return 1, signs

    def _least(self, j: int, k: int, at_zero: tuple[int, ...]) -> Number:
        """The 1 - ρ² that is none: conditioned variances carry the rounding of those that they were taken from."""
        covariance = self.conditioned(at_zero)
        noise = self._scales[j] / covariance[j][j] + self._scales[k] / covariance[k][k]
        return max(self._numbers.collinear, self._numbers.noise * noise)

    def conditioned(self, at_zero: tuple[int, ...]) -> Covariance:
        """Covariance given that these variables are 0; their rows are zero."""
        if at_zero not in self._conditioned:
            before, j = self.conditioned(at_zero[:-1]), at_zero[-1]
            self._conditioned[at_zero] = tuple(
                tuple(v - before[i][j] * before[j][k] / before[j][j] for k, v in enumerate(row))
                for i, row in enumerate(before)
            )
        return self._conditioned[at_zero]

    def density(self, j: int, at_zero: tuple[int, ...] = ()) -> Number:
        """Density of z_j at 0, given the others at 0; 0 where nothing of its variance is left."""
        variance = self.conditioned(at_zero)[j][j]
        if self._collapsed(j, variance):
            return self._numbers.number(0)
        return 1 / self._numbers.sqrt(2 * self._numbers.pi * variance)

    def _collapsed(self, j: int, variance: Number) -> bool:
        return bool(variance <= self._numbers.collapsed * self._scales[j])

    def _lowered(self, powers: tuple[int, ...], signs: tuple[int, ...], at_zero: tuple[int, ...]) -> Number:
        i = next(k for k, power in enumerate(powers) if power)
        covariance = self.conditioned(at_zero)
        left = _lower(powers, i)
        total = self._numbers.number(0)
        for j, c in enumerate(covariance[i]):
            if j in at_zero or c == 0:
                continue
            if left[j]:
                total += c * left[j] * self(_lower(left, j), signs, at_zero)
            elif j in signs:
                density = self.density(j, at_zero)
                if density:
                    rest = tuple(k for k in signs if k != j)
                    total += 2 * c * density * self(left, rest, tuple(sorted((*at_zero, j))))
        return total

    def _signs_alone(self, signs: tuple[int, ...], at_zero: tuple[int, ...]) -> Number:
        numbers = self._numbers
        if not signs:
            return numbers.number(1)
        covariance = self.conditioned(at_zero)
        if any(self._collapsed(j, covariance[j][j]) for j in signs):
            return numbers.number(0)
        scale = [numbers.sqrt(covariance[j][j]) for j in signs]
        if len(signs) == 2:
            rho = covariance[signs[0]][signs[1]] / (scale[0] * scale[1])
            return 2 / numbers.pi * numbers.arcsin(rho)
        rows = [
            [covariance[j][k] / (a * b) for k, b in zip(signs, scale, strict=True)]
            for j, a in zip(signs, scale, strict=True)
        ]
        # Where no two are close nothing is divided by a small angle, and the digits of a double are enough.
        if isinstance(numbers, Decimals) and any(1 - rows[i][j] ** 2 < NARROW**2 for i, j in _CHOICES):
            return four_close_signs(rows, numbers)
        table = torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64, device="cpu")
        return numbers.number(float(four_signs(table)))


def _lower(powers: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*powers[:i], powers[i] - 1, *powers[i + 1 :])
