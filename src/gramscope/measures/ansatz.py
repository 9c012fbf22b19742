"""The neural feature ansatz: is the Gram matrix of a weight a power of the network's gradient outer product?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.agreement import cosine
from gramscope.base.checks import check_number, check_symmetric, check_tensor
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.rounding import Rounding, singular_floor
from gramscope.base.user_warnings import undefined
from gramscope.capture.network import Outputs, Precision
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.gradient_outer_product import layer_agop
from gramscope.measures.rows import check_size


def matrix_power(matrix: Tensor, power: float) -> Float[Tensor, "*g d d"]:
    """``M^α`` of a positive semidefinite matrix (..., d, d) in float64; eigenvalues that are rounding count as zero.

    >>> matrix_power(torch.diag(torch.tensor([4.0, 9.0])), 0.5).tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    check_number(power, "power", above=0.0)
    values, vectors = _eigen(_symmetric(matrix, "matrix"), Rounding.of(matrix))
    return (vectors * values.pow(power)[..., None, :]) @ vectors.mT


def ansatz_correlation(gram: Tensor, agop: Tensor, power: float = 0.5) -> float:
    """Pearson correlation, over entries, of ``WᵀW`` and ``AGOP^α``: 1 where the neural feature ansatz holds.

    Shapes: (..., d, d) both; blocks of groups are pooled. α = ½ by default; a deep linear balanced network has
    α = 1/(number of layers from this one to the output). NaN, with a warning, where one of them is constant over its
    entries. Reference: arXiv:2605.06258, Neural Feature Ansatz; Radhakrishnan et al., Science 383 (2024) 1461.

    Example:
        >>> gram = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> round(ansatz_correlation(gram, gram @ gram, power=0.5), 12)
        1.0
    """
    gram, agop = _both(gram, agop)
    value, why = _pearson(gram, matrix_power(agop, power))
    return undefined("the ansatz correlation", why) if why else value


def ansatz_exponent(gram: Tensor, agop: Tensor, bounds: tuple[float, float] = (0.02, 3.0)) -> float:
    """The power α within ``bounds`` for which ``AGOP^α`` correlates best with ``WᵀW``; 1/L for deep linear networks.

    Shapes: (..., d, d) both. The maximum is searched on a grid of 60 powers and then refined. A value at a bound says
    that no power fits.

    Example:
        >>> gram = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> round(ansatz_exponent(gram, gram @ gram @ gram), 6)
        0.333333
    """
    from scipy.optimize import minimize_scalar

    if len(bounds) != 2 or not 0 < bounds[0] < bounds[1] < math.inf:
        raise InputError(f"bounds must be two powers, 0 < low < high, got {bounds}.")
    gram, agop = _both(gram, agop)
    values, vectors = _eigen(agop, Rounding.of(agop))

    def correlated(power: float) -> tuple[float, str]:
        return _pearson(gram, (vectors * values.pow(power)[..., None, :]) @ vectors.mT)

    def loss(power: float) -> float:
        return -correlated(power)[0]

    grid = torch.logspace(math.log10(bounds[0]), math.log10(bounds[1]), 60, dtype=torch.float64, device="cpu").tolist()
    found = [correlated(power) for power in grid]
    why = next((reason for _, reason in found if reason), "")
    if why:
        return undefined("the ansatz exponent", why)
    losses = [-value for value, _ in found]
    best = min(range(len(grid)), key=losses.__getitem__)
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    refined = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-10})
    return float(refined.x)


@dataclass(frozen=True, eq=False, repr=False)
class Ansatz(ByWeight[float]):
    """Correlations by weight name; ``left_out`` names every other parameter and says why."""

    power: float


def neural_feature_ansatz(
    model: nn.Module,
    x: ModelInput,
    *,
    power: float = 0.5,
    weights: str | Sequence[str] = "*",
    outputs: Outputs = None,
    batch_size: int | None = None,
    precision: Precision = None,
) -> Ansatz:
    """Correlation of ``WᵀW`` and ``AGOP^α`` for every weight on the examples ``x``.

    A weight whose signals are a multiple of the identity (the last linear layer) has ``AGOP ∝ WᵀW`` by construction and
    is left out, with that reason. Other arguments are those of :func:`layer_agop`. Compare with the correlation at
    initialisation: the Gram matrix of a random weight correlates with that of any matrix built from it.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> found = neural_feature_ansatz(model, torch.randn(5, 3))
        >>> list(found), found.left_out["2.weight"]
        (['0.weight'], 'trivial: its signals are a multiple of the identity, so AGOP ∝ WᵀW by construction')
    """
    check_number(power, "power", above=0.0)
    found = layer_agop(model, x, weights, outputs=outputs, batch_size=batch_size, precision=precision)
    correlations: dict[str, float] = {}
    left_out = dict(found.left_out)
    for name, matrix in found.items():
        if _proportional_to_identity(found.signal_covariances[name]):
            left_out[name] = "trivial: its signals are a multiple of the identity, so AGOP ∝ WᵀW by construction"
        else:
            correlations[name] = ansatz_correlation(found.grams[name], matrix, power)
    return Ansatz(correlations, left_out, power)


def _proportional_to_identity(covariance: Float[Tensor, "g o o"]) -> bool:
    scale = covariance.diagonal(dim1=-2, dim2=-1).mean()
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return bool((covariance - scale * identity).abs().max() <= 1e-6 * scale.abs()) and bool(scale > 0)


def _eigen(matrix: Float[Tensor, "*g d d"], rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors; rounding counts as zero, since a small power would make it as large as the others."""
    values, vectors = torch.linalg.eigh(matrix)
    floors = singular_floor(matrix, rounding)
    if bool((values < -floors).any()):
        raise InputError(
            "the matrix to take a power of must be positive semidefinite, but it has an eigenvalue of "
            f"{float(values.min()):.3g}. Is it a gradient outer product?"
        )
    return torch.where(values > floors, values, 0.0), vectors


def _both(gram: Tensor, agop: Tensor) -> tuple[Tensor, Tensor]:
    if check_tensor(gram, "gram").shape != check_tensor(agop, "agop").shape:
        raise InputError(f"gram and agop must have one shape (d, d), got {tuple(gram.shape)} and {tuple(agop.shape)}.")
    return _symmetric(gram, "gram"), _symmetric(agop, "agop")


def _symmetric(matrix: Tensor, what: str) -> Float[Tensor, "*g d d"]:
    # The tolerance is far above bfloat16's rounding.
    check_symmetric(matrix.detach(), what, tol=1e-2, remedy="Of a weight W pass its Gram matrix W.T @ W.")
    check_size(matrix, what)
    return matrix.detach().double()


def _pearson(a: Tensor, b: Tensor) -> tuple[float, str]:
    """The correlation over entries; or NaN, and why."""
    x, y = a.reshape(-1) - a.mean(), b.reshape(-1) - b.mean()
    # Beside the entries themselves, what centring leaves of a constant is rounding.
    constant = [float(c.norm()) <= 1e-12 * float(full.norm()) for c, full in ((x, a), (y, b))]
    if any(constant):
        which = " and ".join(n for n, flat in zip(("WᵀW", "AGOP^α"), constant, strict=True) if flat)
        return math.nan, f"{which} {'are' if all(constant) else 'is'} the same in all entries"
    return cosine(x, y, "the ansatz correlation"), ""
