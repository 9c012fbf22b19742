"""Critical initialisation: where signals neither grow nor fade with depth, class by class (PDLT, arXiv:2106.10165)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gramscope.base.checks import check_count, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.theory.activation_functions import Activation, Kinked, Real, resolve
from gramscope.theory.gaussian_expectations import gaussian_moments
from gramscope.theory.quadrature import Integrand, expectation

UniversalityClass = Literal["scale-invariant", "K*=0", "half-stable"]
ActivationLike = str | Activation | Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Susceptibilities(Result):
    """χ_∥ = C_W <s s'' + s's'>, χ_⊥ = C_W <s's'>, h = ½ C_W <s'''s' + s''s''> = ½ dχ_⊥/dK, of one input."""

    parallel: float
    perpendicular: float
    h: float


def susceptibilities(activation: ActivationLike, K: Real, C_W: Real) -> Susceptibilities:
    """How a small change of the kernel (∥), or of the angle to a close input (⊥), grows in one layer; 1 is critical.

    The derivative form has no 1/K and is safe as K → 0.

    >>> susceptibilities("relu", K=3.0, C_W=2.0)
    Susceptibilities(parallel=1, perpendicular=1, h=0)
    """
    K, C_W = check_number(K, "K", least=0.0), check_number(C_W, "C_W", above=0.0)
    m = gaussian_moments(resolve(activation), torch.tensor([[K]], dtype=torch.float64, device="cpu"))
    p11, p02, p22, p13 = (float(p) for p in (m.p11, m.p02, m.p22, m.p13))
    return Susceptibilities(C_W * (p02 + p11), C_W * p11, C_W / 2 * (p13 + p22))


@dataclass(frozen=True, repr=False)
class CriticalPoint(Result):
    """The tuned initialisation of an activation.

    Attributes:
        universality: "scale-invariant" (any K*), "K*=0", or "half-stable" (K* > 0, reached from one side).
        K_star: the fixed point; None where every K is one.
        C_b, C_W: the hyperparameters that make χ_∥ = χ_⊥ = 1 there.
        exponents: X ∝ l^(-p_X) at large depth, with the learning rates of :func:`equivalent_learning_rates`.
        a_1, b_1: expansion coefficients of χ_∥ and χ_⊥ around K = 0 (K* = 0 class only); p = b_1/a_1.
    """

    activation: str
    universality: UniversalityClass
    K_star: float | None
    C_b: float
    C_W: float
    exponents: dict[str, float]
    a_1: float | None = None
    b_1: float | None = None

    @property
    def p(self) -> float:
        """The exponent p_⊥ = b_1/a_1 of the K* = 0 class; 0 in the others, whose χ_⊥ stays 1."""
        return 0.0 if self.a_1 is None or self.b_1 is None else self.b_1 / self.a_1


def critical_point(activation: ActivationLike) -> CriticalPoint:
    """Tuned (C_b, C_W) from K* = C_b + C_W <s s>, χ_∥(K*) = χ_⊥(K*) = 1 (PDLT, arXiv:2106.10165, chapter 5).

    Both susceptibilities are equal where <s s''> = 0, which fixes K*; then C_W = 1/<s's'>, C_b = K* - C_W <s s>.

    >>> point = critical_point("tanh")
    >>> point.universality, point.C_b, point.C_W, point.exponents["Q"]
    ('K*=0', 0.0, 1.0, -1.0)
    >>> point = critical_point("gelu")
    >>> point.universality, round(point.K_star, 6), round(point.C_b, 8), round(point.C_W, 8)
    ('half-stable', 3.561553, 0.17292239, 1.98305826)
    """
    found = resolve(activation)
    if isinstance(found, Kinked):
        return _scale_invariant(found)
    s_0, s_1, s_2, s_3 = (float(v) for v in found.jets(torch.zeros((), dtype=torch.float64, device="cpu")))
    if abs(s_0) < 1e-12 and abs(s_1) > 1e-12:
        a_1 = s_3 / s_1 + 0.75 * (s_2 / s_1) ** 2
        b_1 = s_3 / s_1 + (s_2 / s_1) ** 2
        if abs(a_1) < 1e-12 and abs(b_1) < 1e-12 and _is_linear(found, s_1):
            return _scale_invariant(Kinked(s_1, s_1, found.name))
        if a_1 < 0:
            p = b_1 / a_1
            exponents = {"K": 1.0, "Theta": p - 1, "V": 1.0, "D": p - 1, "F": p - 1}
            exponents |= {"A": 2 * p - 3, "B": 2 * p - 3, "P": 2 * p - 3, "Q": 2 * p - 3}
            return CriticalPoint(found.name, "K*=0", 0.0, 0.0, 1 / s_1**2, exponents, a_1, b_1)
    return _half_stable(found)


def _scale_invariant(activation: Kinked) -> CriticalPoint:
    exponents = {"K": 0.0, "Theta": -1.0, "V": -1.0, "D": -2.0, "F": -2.0, "A": -3.0, "B": -3.0, "Q": -3.0}
    return CriticalPoint(activation.name, "scale-invariant", None, 0.0, 1 / activation.A_2, exponents)


def _is_linear(activation: Activation, slope: float) -> bool:
    z = torch.linspace(-6, 6, 49, dtype=torch.float64, device="cpu")
    return bool(((activation.jets(z)[1] - slope).abs() < 1e-12 * abs(slope)).all())


def _half_stable(activation: Activation) -> CriticalPoint:
    from scipy.optimize import brentq

    def bend(log_K: float, level: int = 400) -> float:
        return _single(activation, float(np.exp(log_K)), level)[1]

    grid = np.linspace(np.log(1e-2), np.log(300.0), 61)
    values = [bend(point, 60) for point in grid]  # a few digits are enough to find the change of sign
    for left, right, a, b in zip(grid, grid[1:], values, values[1:], strict=False):
        if a * b >= 0:
            continue
        if bend(left) * bend(right) >= 0:
            continue
        K = float(np.exp(brentq(bend, left, right, xtol=1e-14, rtol=1e-14)))
        ss, _, slopes = _single(activation, K)
        C_W, C_b = 1 / slopes, K - ss / slopes
        if C_b >= 0:
            return CriticalPoint(activation.name, "half-stable", K, C_b, C_W, {"K": 0.0, "Theta": -1.0})
    raise InputError(
        f"activation {activation.name!r} must have a critical point, but no K* in [0.01, 300] has χ_∥ = χ_⊥ = 1 with "
        "C_b >= 0, and K* = 0 is none. Shift it so that s(0) = 0, or choose tanh, sin, erf, gelu, silu or relu."
    )


def _single(activation: Activation, K: float, level: int = 400) -> tuple[float, float, float]:
    """<s s>, <s s''>, <s's'> of one input; to about 1e-13 at the level 400."""
    covariance = torch.full((2, 2), K, dtype=torch.float64, device="cpu")
    table = expectation(Integrand(activation.jets), covariance, (0, 0), level)
    return float(table[0, 0]), float(table[0, 2]), float(table[1, 1])


def equivalent_learning_rates(
    activation: ActivationLike, depth: int, lambda_b: Real = 1.0, lambda_W: Real = 1.0
) -> tuple[list[float], list[float]]:
    """λ_b and λ_W of layers 1..L by which every layer has an equal part in the NTK (the equivalence principle).

    Scale-invariant and half-stable: λ/L. K* = 0 class: λ_b^(l) = λ_b l^(-p) L^(p-1), λ_W^(l) = λ_W (L/l)^(p-1). A
    weight of layer l has the learning rate η λ_W^(l)/n_{l-1}, a bias η λ_b^(l). PDLT (arXiv:2106.10165) chapter 9.

    >>> equivalent_learning_rates("relu", 4)
    ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25])
    >>> equivalent_learning_rates("tanh", 2)      # p = 1: biases of deep layers get less, weights the same
    ([1.0, 0.5], [1.0, 1.0])
    """
    check_count(depth, "depth")
    check_number(lambda_b, "lambda_b", least=0.0)
    check_number(lambda_W, "lambda_W", least=0.0)
    point = critical_point(activation)
    if point.universality != "K*=0":
        return [lambda_b / depth] * depth, [lambda_W / depth] * depth
    p = point.p
    layers = range(1, depth + 1)
    biases = [lambda_b * layer ** (-p) * depth ** (p - 1) for layer in layers]
    return biases, [lambda_W * (depth / layer) ** (p - 1) for layer in layers]
