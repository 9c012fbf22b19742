"""Moments of Gaussian variables and their signs: E[z^p ∏ sgn(z_i)], for up to four variables.

Stein's lemma, E[z_i G] = Σ_j C_ij E[∂_j G] with ∂ sgn(z) = 2δ(z), lowers the powers one at a time; what is left is
E[sgn sgn] = (2/π) arcsin ρ and E[sgn sgn sgn sgn], which has no elementary form. Plackett's identity,
∂/∂ρ_ij E[∏ sgn] = 4 E[δ_i δ_j sgn_k sgn_l], makes it an integral over one variable of arcsines.
"""

import itertools
import math
from collections.abc import Sequence

from gramscope.theory.decimal_arithmetic import NARROW, Doubles, Number

_PAIRS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (1, 2, 0, 3), (1, 3, 0, 2), (2, 3, 0, 1))
_LEVELS = 10

Rows = Sequence[Sequence[Number]]


def four_signs(correlation: Rows, numbers: Doubles | None = None) -> Number:
    """E[sgn z₁ sgn z₂ sgn z₃ sgn z₄] for a correlation matrix, to the digits that ``numbers`` asks for.

    >>> half = [[1.0, 0.5, 0, 0], [0.5, 1.0, 0, 0], [0, 0, 1.0, 0.5], [0, 0, 0.5, 1.0]]
    >>> round(four_signs(half), 12)                     # two independent pairs: ((2/π) arcsin ½)² = 1/9
    0.111111111111
    """
    numbers = numbers or Doubles()
    # Variables are turned to the side of the first, so that a correlation close to -1 is one close to 1.
    turn = [-1 if value < 0 else 1 for value in correlation[0]]
    turned = [[v * a * b for v, b in zip(row, turn, strict=True)] for row, a in zip(correlation, turn, strict=True)]
    sums = before = numbers.number(0)
    for level in range(_LEVELS):
        sums += sum(weight * _slope(turned, t, left, numbers) for t, left, weight in numbers.nodes(level))
        value = sums / (4 * 2**level)
        if level and abs(value - before) <= numbers.number(10) ** (-5 * numbers.target // 8):
            break
        before = value
    return math.prod(turn) * 4 * value / numbers.pi**2


def _slope(correlation: Rows, t: Number, left: Number, numbers: Doubles) -> Number:
    """(π²/4) dE/dt where the correlations are t ρ, ``left`` = 1 - t.

    All is written in 1 - t ρ, which keeps its digits where ρ is close to 1.
    """
    gaps = [[left + t * (1 - value) for value in row] for row in correlation]
    total = numbers.number(0)
    for i, j, k, m in _PAIRS:
        det = gaps[i][j] * (2 - gaps[i][j])
        product = _minor(gaps, i, j, k, k) * _minor(gaps, i, j, m, m)
        if det > 0 and product > 0:
            angle = numbers.arcsin(_minor(gaps, i, j, k, m) / numbers.sqrt(product))
            total += correlation[i][j] / numbers.sqrt(det) * angle
    return total


def _minor(gaps: Rows, i: int, j: int, k: int, m: int) -> Number:
    """Determinant of the correlations of (i, j, k) with (i, j, m): det × their covariance given z_i = z_j = 0."""
    ij, ik, jk, im, jm = gaps[i][j], gaps[i][k], gaps[j][k], gaps[i][m], gaps[j][m]
    km = gaps[k][m] if k != m else 0
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
        if any(1 - rows[i][j] ** 2 < NARROW**2 for i, j in itertools.combinations(range(4), 2)):
            return four_signs(rows, numbers)
        # Where no two are close nothing is divided by a small angle, and the digits of a double are enough.
        return numbers.number(four_signs([[float(v) for v in row] for row in rows]))


def _lower(powers: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*powers[:i], powers[i] - 1, *powers[i + 1 :])
