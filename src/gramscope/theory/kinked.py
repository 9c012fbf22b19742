"""Expectations of piecewise linear activations in closed form, with the rule for s'' at the kink.

s = z (a + b sgn z) and s' = a + b sgn z with a = (a₊ + a₋)/2, b = (a₊ - a₋)/2; s'' = 2b δ(z). Where m factors s' sit
on the sample of s'', the product is read as the limit of smooth activations, s'' s'ᵐ -> (a₊ᵐ⁺¹ - a₋ᵐ⁺¹)/(m+1) δ(z)
(PDLT, arXiv:2106.10165). Samples on one line (z_b = c z_a, c ≠ 0) share a kink: they count as one sample, sgn c apart.
Samples at small angles are computed in decimals (see ``decimal_arithmetic.py``).
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Kinked
from gramscope.theory.decimal_arithmetic import NARROW, Decimals, Doubles, Number
from gramscope.theory.families import PAIRS, QUADS, GaussianMoments, multisets
from gramscope.theory.orthant import SignMoments

Table = Sequence[Sequence[Number]]
Lines = list[tuple[int, Number]]
ROUNDING = 1e-15  # of a kernel that is given in doubles: a 1 - ρ² of a few of these cannot be told from 0


def kinked_moments(activation: Kinked, kernel: Float[Tensor, "n n"]) -> GaussianMoments:
    """All moments of a piecewise linear activation; four distinct samples cost one integral over one variable."""
    if not activation.is_linear and float(kernel.diagonal().min()) <= 0:
        where = int(kernel.diagonal().argmin())
        raise InputError(
            f"every sample must have K_aa > 0 for an activation with a kink, got {float(kernel[where, where])} "
            f"for sample {where}: its preactivations are exactly at the kink, where s' is not defined. Leave out zero "
            "inputs, or take C_b > 0."
        )
    arrays = _of_doubles(activation, kernel.detach().cpu().tolist())
    return GaussianMoments(
        **{name: torch.from_numpy(array.astype(np.float64)).to(kernel) for name, array in arrays.items()}
    )


def _of_doubles(activation: Kinked, table: list[list[float]]) -> dict[str, np.ndarray]:
    numbers = Doubles()
    lines = lines_of(table, numbers.collinear)
    if activation.is_linear or not is_narrow(table):
        return moment_arrays(activation, table, lines, numbers)
    wide = Decimals(ROUNDING)
    with wide.context():
        exact = without_rounding([[wide.number(v) for v in row] for row in table])
        lines = lines_of(exact, 4 * wide.number(ROUNDING))
        sine = narrowest(exact, lines)
        if sine >= NARROW:
            return moment_arrays(activation, table, [(first, float(c)) for first, c in lines], numbers)
    many = Decimals(sine)
    with many.context():
        return moment_arrays(activation, on_lines(exact, lines, 4 * ROUNDING), lines, many)


def without_rounding(kernel: Table) -> list[list[Number]]:
    """The covariance next to a kernel of doubles: what pivoting leaves below their rounding is not variance but noise.

    Samples at small angles would otherwise have small variances of either sign, given the others, that mean nothing.
    """
    n = len(kernel)
    left, kept = [list(row) for row in kernel], [[0 * v for v in row] for row in kernel]
    while True:
        shares = [left[i][i] / kernel[i][i] if kernel[i][i] > 0 else 0 for i in range(n)]
        p = max(range(n), key=shares.__getitem__)
        if shares[p] <= ROUNDING:
            return kept
        column = [left[i][p] for i in range(n)]
        for i, j in itertools.product(range(n), repeat=2):
            part = column[i] * column[j] / column[p]
            left[i][j], kept[i][j] = left[i][j] - part, kept[i][j] + part
        left[p][p] *= 0  # but for the last digits it is


def is_narrow(table: Table) -> bool:
    """Whether two samples are at a small angle, or at none."""
    pairs = itertools.combinations(range(len(table)), 2)
    return any(_sine_squared(table, a, b) < NARROW**2 for a, b in pairs)


def _sine_squared(kernel: Table, a: int, b: int) -> Number:
    """1 - ρ², without products that very small or large kernels would not hold."""
    return 1 - kernel[a][b] / kernel[a][a] * (kernel[a][b] / kernel[b][b])


def lines_of(kernel: Table, least: Number) -> Lines:
    """For each sample the first sample on its line (1 - ρ² ≤ ``least``), and the factor c with z = c z_first."""
    found: Lines = []
    for b, row in enumerate(kernel):
        for a in sorted({first for first, _ in found}):
            if kernel[a][a] > 0 and row[b] > 0 and _sine_squared(kernel, a, b) <= least:
                found.append((a, row[a] / kernel[a][a]))
                break
        else:
            found.append((b, 1))
    return found


def on_lines(kernel: Table, lines: Lines, unit: float) -> list[list[Number]]:
    """The kernel with z_b = c z_a exactly where the samples are on one line; c is 1 where it is so to ``unit``."""
    factors = [1 if abs(c - 1) <= unit else c for _, c in lines]
    return [
        [factors[b] * factors[d] * kernel[lines[b][0]][lines[d][0]] for d in range(len(kernel))]
        for b in range(len(kernel))
    ]


def narrowest(kernel: Table, lines: Lines) -> Number:
    """The smallest sine between samples that are not on one line."""
    firsts = sorted({first for first, _ in lines})
    squares = [_sine_squared(kernel, a, b) for a, b in itertools.combinations(firsts, 2)]
    return max(min(squares, default=kernel[0][0] * 0 + 1), kernel[0][0] * 0) ** type(kernel[0][0])(0.5)


def moment_arrays(activation: Kinked, kernel: Table, lines: Lines, numbers: Doubles) -> dict[str, np.ndarray]:
    """The moments by name, as arrays of numbers; decimals within their context."""
    n = len(kernel)
    found = {name: np.empty((n, n), dtype=object) for name in PAIRS}
    found |= {name: np.empty((n,) * 4, dtype=object) for name in QUADS}
    for at in itertools.product(range(n), repeat=2):
        for name, value in pair_moments(activation, kernel, lines, at, numbers).items():
            found[name][at] = value
    quads = {samples: _quad(activation, kernel, lines, samples, numbers) for samples in multisets(n, 4)}
    for at in itertools.product(range(n), repeat=4):
        places = sorted(range(4), key=at.__getitem__)
        of_samples = quads[tuple(at[place] for place in places)]
        for name, orders in QUADS.items():
            found[name][at] = of_samples[tuple(orders[place] for place in places)]
    return found


def pair_moments(
    activation: Kinked, kernel: Table, lines: Lines, at: tuple[int, ...], numbers: Doubles
) -> dict[str, Number]:
    """<s s>, <s's'>, <s s''>, <s''s''>, <s's'''> of two samples."""
    a, b = _slopes(activation, numbers)
    first, second = at
    cov, var_a, var_b = kernel[first][second], kernel[first][first], kernel[second][second]
    zero = numbers.number(0)
    if b == 0:
        return {"p00": a * a * cov, "p11": a * a, "p02": zero, "p22": zero, "p13": zero}
    scale = numbers.sqrt(var_a) * numbers.sqrt(var_b)
    weight = 2 * b * b / numbers.pi
    if lines[first][0] == lines[second][0]:
        # On one line the two terms of a derivative, <s'''s'> and <s''s''>, are infinite and cancel: both are left out.
        angle = numbers.pi / 2 if cov > 0 else -numbers.pi / 2
        p00 = a * a * cov + weight * scale * abs(angle)
        return {"p00": p00, "p11": a * a + weight * angle, "p02": zero, "p22": zero, "p13": zero}
    rho = cov / scale
    sine, angle = numbers.sqrt((1 - rho) * (1 + rho)), numbers.arcsin(rho)
    return {
        "p00": a * a * cov + weight * scale * (sine + rho * angle),
        "p11": a * a + weight * angle,
        "p02": weight * var_a / scale * sine,
        "p22": weight / (sine * scale),
        "p13": -weight * rho / (sine * var_b),
    }


def _slopes(activation: Kinked, numbers: Doubles) -> tuple[Number, Number]:
    plus, minus = numbers.number(activation.a_plus), numbers.number(activation.a_minus)
    return (plus + minus) / 2, (plus - minus) / 2


_ORDERS = sorted({orders for family in QUADS.values() for orders in itertools.permutations(family)})


def _quad(
    activation: Kinked, kernel: Table, lines: Lines, samples: tuple[int, ...], numbers: Doubles
) -> dict[tuple[int, ...], Number]:
    """Expectations of one multiset of four samples for all orders of the families."""
    firsts = sorted({lines[s][0] for s in samples})
    moments = SignMoments([[kernel[i][j] for j in firsts] for i in firsts], numbers)
    slots = [(firsts.index(lines[s][0]), lines[s][1]) for s in samples]
    slopes = _slopes(activation, numbers)
    return {orders: _product(slopes, moments, len(firsts), slots, orders) for orders in _ORDERS}


def _product(
    slopes: tuple[Number, Number], moments: SignMoments, lines: int, slots: Lines, orders: tuple[int, ...]
) -> Number:
    a, b = slopes
    factor: Number = 1
    at_zero: tuple[int, ...] = ()
    powers = [0] * lines
    even, odd = [1 + 0 * a] * lines, [0 * a] * lines  # ∏ (a + b sgn(c z)) = even + odd sgn z, line by line
    kink = slots[orders.index(2)] if 2 in orders else None
    on_kink: list[int] = []
    for (line, c), order in zip(slots, orders, strict=True):
        if order == 2:
            continue
        if kink is not None and line == kink[0]:
            if order == 0:
                return 0 * a  # s(0) = 0
            on_kink.append(_sign(c) * _sign(kink[1]))
            continue
        if order == 0:
            powers[line] += 1
            factor *= c
        turned = b * _sign(c)
        even[line], odd[line] = even[line] * a + odd[line] * turned, even[line] * turned + odd[line] * a
    if kink is not None:
        # δ(c z) = δ(z)/|c|
        factor *= _kink_weight(a, b, on_kink) * moments.density(kink[0]) / abs(kink[1])
        at_zero = (kink[0],)
    total = 0 * a
    if factor == 0:
        return total
    for count in range(lines + 1):
        for signs in itertools.combinations(range(lines), count):
            weight = math.prod(odd[g] if g in signs else even[g] for g in range(lines))
            if weight:
                total += weight * moments(tuple(powers), signs, at_zero)
    return factor * total


def _sign(c: Number) -> int:
    return 1 if c >= 0 else -1


def _kink_weight(a: Number, b: Number, on_kink: list[int]) -> Number:
    """∫ s''(z) ∏ s'(±z) dz across the kink: there sgn z runs evenly through [-1, 1] in every smooth version of s'."""
    if len(on_kink) == 2:
        return 2 * b * (a * a + on_kink[0] * on_kink[1] * b * b / 3)
    return 2 * b * a ** len(on_kink)
