"""Expectations of piecewise linear activations in closed form, with the rule for s'' at the kink.

s = z (a + b sgn z) and s' = a + b sgn z with a = (a₊ + a₋)/2, b = (a₊ - a₋)/2; s'' = 2b δ(z). Where m factors s' sit
on the sample of s'', the product is read as the limit of smooth activations, s'' s'ᵐ -> (a₊ᵐ⁺¹ - a₋ᵐ⁺¹)/(m+1) δ(z)
(theory 3, section 4b). Samples on one line (z_b = c z_a, c ≠ 0) share a kink: they count as one sample, sgn c apart.
"""

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.theory.activations import Kinked
from gramscope.theory.families import QUADS, Moments, from_multisets, multisets
from gramscope.theory.orthant import SignMoments

_COLLINEAR = 1e-12  # of 1 - ρ²


def kinked_moments(activation: Kinked, kernel: Float[Tensor, "n n"]) -> Moments:
    """All moments of a piecewise linear activation; four distinct samples cost one integral over one variable."""
    if not activation.is_linear and float(kernel.diagonal().min()) <= 0:
        where = int(kernel.diagonal().argmin())
        raise InputError(
            f"every sample must have K_aa > 0 for an activation with a kink, got {float(kernel[where, where])} "
            f"for sample {where}: its preactivations sit on the kink, where s' is not defined. Leave out zero inputs, "
            "or take C_b > 0."
        )
    table = kernel.detach().cpu().tolist()
    lines = _lines(table)
    n = kernel.shape[0]
    quads = [_quad(activation, table, lines, samples) for samples in multisets(n, 4)]
    tensors = from_multisets(n, 4, QUADS, [value.to(kernel) for value in quads])
    return Moments(**_pairs(activation, kernel), **tensors)


def _lines(kernel: list[list[float]]) -> list[tuple[int, float]]:
    """For each sample the first sample on its line, and the factor c with z = c z_first."""
    found: list[tuple[int, float]] = []
    for b, row in enumerate(kernel):
        for a in sorted({first for first, _ in found}):
            if kernel[a][a] > 0 and row[b] > 0 and 1 - row[a] ** 2 / (kernel[a][a] * row[b]) <= _COLLINEAR:
                found.append((a, row[a] / kernel[a][a]))
                break
        else:
            found.append((b, 1.0))
    return found


def _pairs(activation: Kinked, kernel: Tensor) -> dict[str, Tensor]:
    a, b = (activation.a_plus + activation.a_minus) / 2, (activation.a_plus - activation.a_minus) / 2
    if b == 0:
        zero = torch.zeros_like(kernel)
        return {"p00": a * a * kernel, "p11": zero + a * a, "p02": zero, "p22": zero, "p13": zero}
    variance = kernel.diagonal()
    var_a, var_b = variance[:, None], variance[None, :]
    rho = (kernel / (var_a * var_b).sqrt()).clamp(-1, 1)
    sine = ((1 - rho) * (1 + rho)).clamp(min=0)
    aligned = sine <= _COLLINEAR
    rho = torch.where(aligned, rho.sign(), rho)
    sine = torch.where(aligned, torch.zeros_like(sine), sine).sqrt()
    weight = 2 * b * b / math.pi
    angle = torch.asin(rho)
    # On one line the two terms of a derivative, <s'''s'> and <s''s''>, are infinite and cancel: both are left out.
    inverse = torch.where(aligned, torch.zeros_like(sine), 1 / sine.clamp(min=1e-30))
    return {
        "p00": a * a * kernel + weight * (var_a * var_b).sqrt() * (sine + rho * angle),
        "p11": a * a + weight * angle,
        "p02": weight * (var_a / var_b).sqrt() * sine,
        "p22": weight * inverse / (var_a * var_b).sqrt(),
        "p13": -weight * rho * inverse / var_b,
    }


def _quad(
    activation: Kinked, kernel: list[list[float]], lines: list[tuple[int, float]], samples: tuple[int, ...]
) -> Tensor:
    """Expectations of one multiset of four samples for all orders of the families, as a (3, 3, 3, 3) table."""
    firsts = sorted({lines[s][0] for s in samples})
    moments = SignMoments([[kernel[i][j] for j in firsts] for i in firsts])
    slots = [(firsts.index(lines[s][0]), lines[s][1]) for s in samples]
    result = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    wanted = {orders for family in QUADS.values() for orders in itertools.permutations(family)}
    for orders in wanted:
        result[orders] = _product(activation, moments, len(firsts), slots, orders)
    return result


def _product(
    activation: Kinked, moments: SignMoments, lines: int, slots: list[tuple[int, float]], orders: tuple[int, ...]
) -> float:
    a, b = (activation.a_plus + activation.a_minus) / 2, (activation.a_plus - activation.a_minus) / 2
    factor = 1.0
    at_zero: tuple[int, ...] = ()
    powers = [0] * lines
    even, odd = [1.0] * lines, [0.0] * lines  # ∏ (a + b sgn(c z)) = even + odd sgn z, line by line
    kink = slots[orders.index(2)] if 2 in orders else None
    on_kink: list[float] = []
    for (line, c), order in zip(slots, orders, strict=True):
        if order == 2:
            continue
        if kink is not None and line == kink[0]:
            if order == 0:
                return 0.0  # s(0) = 0
            on_kink.append(math.copysign(1.0, c) * math.copysign(1.0, kink[1]))
            continue
        if order == 0:
            powers[line] += 1
            factor *= c
        turned = b * math.copysign(1.0, c)
        even[line], odd[line] = even[line] * a + odd[line] * turned, even[line] * turned + odd[line] * a
    if kink is not None:
        # δ(c z) = δ(z)/|c|
        factor *= _kink_weight(a, b, on_kink) * moments.density(kink[0]) / abs(kink[1])
        at_zero = (kink[0],)
    if factor == 0:
        return 0.0
    total = 0.0
    for count in range(lines + 1):
        for signs in itertools.combinations(range(lines), count):
            weight = math.prod(odd[g] if g in signs else even[g] for g in range(lines))
            if weight:
                total += weight * moments(tuple(powers), signs, at_zero)
    return factor * total


def _kink_weight(a: float, b: float, on_kink: list[float]) -> float:
    """∫ s''(z) ∏ s'(±z) dz across the kink: there sgn z runs evenly through [-1, 1] in every smooth version of s'."""
    if len(on_kink) == 2:
        return 2 * b * (a * a + on_kink[0] * on_kink[1] * b * b / 3)
    return 2 * b * a ** len(on_kink)
