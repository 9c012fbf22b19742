"""Solutions of the recursions at criticality for one input, in closed form (PDLT, arXiv:2106.10165, chapter 5)."""

import math
from dataclasses import dataclass

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.theory.activation_functions import Kinked, Real, resolve
from gramscope.theory.criticality import ActivationLike, critical_point


@dataclass(frozen=True, repr=False)
class SingleInput(Result):
    """Tensors of one layer for one input."""

    K: float
    Theta: float
    V: float
    F: float
    B: float
    P: float
    Q: float


def scale_invariant_layer(
    activation: ActivationLike, layer: int, depth: int, K: Real, lambda_b: Real = 1.0, lambda_W: Real = 1.0
) -> SingleInput:
    """Exact solution at layer l of a critical piecewise linear network, learning rates λ/L, one input (11.74)-(11.81).

    With S = λ_b + λ_W A_2 K: Θ = S l/L, V = (l-1)(3A_4/A_2² - 1)K², F = (l(l-1)/2L)(A_4/A_2²) S K,
    B = (A_4/A_2²)(S/L)² (l-1)l(2l-1)/6, P = 0, Q = (l(l²-1)/6L²)(A_4/A_2) S λ_W K. K is x·x/(n_0 A_2).

    >>> round(scale_invariant_layer("relu", 8, 8, K=1.0, lambda_b=0.0).Q, 6)
    0.65625
    """
    found = resolve(activation)
    if not isinstance(found, Kinked):
        raise InputError(f"activation must be piecewise linear (relu, leaky_relu, linear, Kinked), got {found.name!r}.")
    _check_layer(layer, depth)
    K = check_number(K, "K", least=0.0)
    lambda_b, lambda_W = check_number(lambda_b, "lambda_b", least=0.0), check_number(lambda_W, "lambda_W", least=0.0)
    L, ratio = depth, found.A_4 / found.A_2**2
    S = lambda_b + lambda_W * found.A_2 * K
    return SingleInput(
        K=K,
        Theta=S * layer / L,
        V=(layer - 1) * (3 * ratio - 1) * K**2,
        F=layer * (layer - 1) / (2 * L) * ratio * S * K,
        B=ratio * (S / L) ** 2 * (layer - 1) * layer * (2 * layer - 1) / 6,
        P=0.0,
        Q=layer * (layer**2 - 1) / (6 * L**2) * found.A_4 / found.A_2 * S * lambda_W * K,
    )


def vanishing_kernel_layer(
    activation: ActivationLike, layer: int, depth: int, lambda_b: Real = 1.0, lambda_W: Real = 1.0
) -> SingleInput:
    """Leading large-l form at layer l of a critical network of the K* = 0 class (tanh, sin, erf), (11.82)-(11.102).

    With the learning rates of :func:`equivalent_learning_rates` and S = λ_b + λ_W s_1²/(-a_1): K = 1/(-a_1 l),
    Θ = S (L/l)^(p-1), V = 2/(3 a_1² l), F = Θ/((5-p)(-a_1)), B = (S²/3) L^(2p-2) l^(3-2p),
    P = -((2-p)/(5-p)) B, Q = (S²/(5-p)²)(1 - p - λ_b/S) L^(2p-2) l^(3-2p). Corrections are O(log l / l): 1-4 % at
    l = 200, far more where the bracket of Q nearly cancels. Use the recursion for real depths.

    >>> at_200 = vanishing_kernel_layer("tanh", 200, 200, lambda_b=0.0)
    >>> at_200.K, at_200.Q                        # p = 1 and no biases: the leading Q is zero
    (0.0025, 0.0)
    """
    _check_layer(layer, depth)
    point = critical_point(activation)
    if point.universality != "K*=0" or point.a_1 is None:
        raise InputError(
            f"activation must be of the K* = 0 class (tanh, sin, erf), {point.activation!r} is {point.universality}."
        )
    L, p, a = depth, point.p, -point.a_1
    S = lambda_b + lambda_W / (point.C_W * a)  # s_1² = 1/C_W
    if S <= 0:
        raise InputError("lambda_b and lambda_W must not both be 0: nothing would train.")
    Theta = S * (L / layer) ** (p - 1)
    growth = S**2 * math.pow(L, 2 * p - 2) * math.pow(layer, 3 - 2 * p)
    return SingleInput(
        K=1 / (a * layer),
        Theta=Theta,
        V=2 / (3 * a**2 * layer),
        F=Theta / ((5 - p) * a),
        B=growth / 3,
        P=-growth / 3 * (2 - p) / (5 - p),
        Q=growth * (1 - p - lambda_b / S) / (5 - p) ** 2,
    )


def _check_layer(layer: int, depth: int) -> None:
    if not (isinstance(layer, int) and isinstance(depth, int) and 1 <= layer <= depth):
        raise InputError(f"layer and depth must be integers with 1 <= layer <= depth, got {layer!r} and {depth!r}.")
