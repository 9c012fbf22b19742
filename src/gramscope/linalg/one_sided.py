"""Traces of ``J Jᵀ`` from one side of J alone, and estimates that go on until they are good enough."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError
from gramscope.base.rng import Distribution, probes
from gramscope.linalg.arguments import require_operator, require_whole, stream
from gramscope.linalg.intervals import half_widths, rounding_unit
from gramscope.linalg.operator import LinearOperator, require_finite
from gramscope.linalg.orthogonal import norms
from gramscope.linalg.scale import excess
from gramscope.linalg.traces import Estimate, mean_and_error, require_budget

Side = Literal["reverse", "forward"]


@dataclass(frozen=True)
class TraceEstimate:
    """A random estimate with its error, how it was made, and whether it met what was asked (None: nothing was).

    ``standard_error`` and :meth:`interval` are those of :class:`Estimate`. ``samples`` is None where there are as many
    as ``products``.
    """

    value: float
    standard_error: float
    products: int
    seed: int
    method: str
    distribution: str
    dtype: torch.dtype
    device: torch.device
    tolerance: float | None = None
    converged: bool | None = None
    samples: int | None = None

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """From where to where the true value lies with probability ``level`` or more, from few samples as well."""
        half = half_widths(level, self.products if self.samples is None else self.samples) * self.standard_error
        return self.value - half, self.value + half

    @property
    def relative_error(self) -> float:
        """``standard_error / |value|``; infinite for an estimate of zero that has an error."""
        if self.standard_error == 0:
            return 0.0
        return self.standard_error / abs(self.value) if self.value else float("inf")

    def __str__(self) -> str:
        met = {None: "", True: ", converged", False: ", NOT converged"}[self.converged]
        return f"{self.value:.6g} ± {self.standard_error:.2g} ({self.method}, {self.products} products{met})"


@torch.no_grad()
@exact_arithmetic()
def one_sided_trace(
    jacobian: LinearOperator,
    products: int,
    *,
    side: Side = "reverse",
    distribution: Distribution = "rademacher",
    seed: int = 0,
    block: int = 64,
) -> TraceEstimate:
    """``tr(J Jᵀ) = E ‖Jᵀ v‖²`` (reverse products only) ``= E ‖J w‖²`` (forward only), E over ``E[v vᵀ] = 1``.

    Half the work of Hutchinson on ``J Jᵀ`` for the same samples, and it needs one mode of differentiation. Both are
    unbiased; the variance is ``2 Σ_{i≠j} (J Jᵀ)_ij²`` for random signs on the reverse side, that of ``Jᵀ J`` on the
    forward side. arXiv:2511.10796.

    >>> from gramscope.linalg import Dense
    >>> J = Dense(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    >>> print(one_sided_trace(J, products=4))      # exact but for rounding
    25 ± 6e-06 (reverse, 4 products)
    """
    _require_side(jacobian, side, block)
    require_budget(products, 2, "one_sided_trace")
    lengths = _one_sided_lengths(jacobian, side, distribution, seed, 0, products, block)
    value, error, scale = _mean_square(lengths, _unit(jacobian))
    return TraceEstimate(
        value * scale * scale,
        error * scale * scale,
        products,
        seed,
        side,
        distribution,
        jacobian.dtype,
        jacobian.device,
    )


def _mean_square(lengths: Float64[Tensor, " m"], unit: float) -> tuple[float, float, float]:
    """The mean of the squares with its error, of lengths divided by a power of two, and the power."""
    scale = 2.0 ** excess(lengths)
    value, error = mean_and_error((lengths / scale) ** 2)
    return value, max(error, unit * value), scale


def _unit(jacobian: LinearOperator) -> float:
    return rounding_unit(jacobian.dtype, max(jacobian.shape))


def _one_sided_lengths(
    jacobian: LinearOperator, side: Side, distribution: Distribution, seed: int, start: int, stop: int, block: int
) -> Float64[Tensor, " m"]:
    """Roots of samples ``start`` to ``stop`` of this seed's one stream: a longer run begins with a shorter one's."""
    op = jacobian.adjoint() if side == "reverse" else jacobian
    lengths = []
    for first in range(start, stop, block):
        columns = [
            probes(
                op.cols.size,
                1,
                distribution,
                rng=stream(seed, "one_sided", side, index),
                dtype=op.dtype,
                device=op.device,
            )
            for index in range(first, min(first + block, stop))
        ]
        product = op.matmat(torch.cat(columns, dim=1))
        require_finite(product, op)
        lengths.append(norms(product))
    return torch.cat(lengths)


@torch.no_grad()
@exact_arithmetic()
def one_sided_trace_to(
    jacobian: LinearOperator,
    tolerance: float,
    *,
    side: Side = "reverse",
    distribution: Distribution = "rademacher",
    seed: int = 0,
    start: int = 16,
    most: int = 4096,
    block: int = 64,
) -> TraceEstimate:
    """:func:`one_sided_trace` with as many products as it takes: until the standard error is ``tolerance · value``.

    Samples are kept and their number grows by half, so nothing is done twice. It stops at ``most`` products and then
    says that it has not converged. The stopping rule looks at the same samples as the estimate, so a standard error
    that happens to come out small stops it early: read it as an order of magnitude.

    >>> from gramscope.linalg import Dense
    >>> J = Dense(torch.ones(4, 4, dtype=torch.float64))
    >>> one_sided_trace_to(J, tolerance=0.05, most=64).converged, one_sided_trace_to(J, tolerance=0.3).converged
    (False, True)
    """
    _require_side(jacobian, side, block)
    _require_tolerance(tolerance, most, start, 2)
    lengths = _one_sided_lengths(jacobian, side, distribution, seed, 0, start, block)
    while True:
        value, error, scale = _mean_square(lengths, _unit(jacobian))
        met = error <= tolerance * abs(value)
        met = met and (value == 0 or 0 < value * scale * scale < math.inf)  # else no float64 is near it
        count = len(lengths)
        if met or count >= most:
            kind = (jacobian.dtype, jacobian.device)
            value, error = value * scale * scale, error * scale * scale
            return TraceEstimate(value, error, count, seed, side, distribution, *kind, tolerance, met)
        wanted = min(most, max(count + 2, count * 3 // 2))
        more = _one_sided_lengths(jacobian, side, distribution, seed, count, wanted, block)
        lengths = torch.cat([lengths, more])


@torch.no_grad()
@exact_arithmetic()
def trace_to(
    op: LinearOperator,
    tolerance: float,
    method: Callable[..., Estimate],
    *,
    seed: int = 0,
    start: int = 12,
    most: int = 3072,
) -> TraceEstimate:
    """A trace by ``hutchinson``, ``hutchpp`` or ``xtrace`` to a relative standard error, doubling the products.

    Each round starts anew, since the range these methods find depends on the budget; all products made are counted.
    It stops at ``most`` in one round, or at the operator's size, and says whether the tolerance was met.

    >>> from gramscope.linalg import Diagonal, hutchpp
    >>> op = Diagonal(1 / torch.arange(1, 101, dtype=torch.float64) ** 2)
    >>> estimate = trace_to(op, 1e-3, hutchpp)
    >>> estimate.converged, abs(estimate.value - 1.63498) < 0.01
    (True, True)
    """
    require_operator(op, "trace_to")
    if not callable(method):
        raise InputError(
            f"method must be one of the functions hutchinson, hutchpp and xtrace, got {method!r}. "
            "Pass it itself: from gramscope.linalg import hutchpp; trace_to(op, 0.01, hutchpp)."
        )
    _require_tolerance(tolerance, most, start, 6)
    spent, products = 0, start
    while True:
        found = method(op, products, seed=seed)
        spent += found.products
        met = found.standard_error <= tolerance * abs(found.value)
        if met or products >= most:
            return TraceEstimate(
                found.value, found.standard_error, spent, seed, found.method, found.distribution, op.dtype, op.device,
                tolerance, met, found.samples,
            )  # fmt: skip
        products = min(most, 2 * products)


def _require_side(jacobian: LinearOperator, side: str, block: int) -> None:
    require_operator(jacobian, "one_sided_trace")
    require_whole(1, block=block)
    if side not in ("reverse", "forward"):
        raise InputError(f"side must be 'reverse' or 'forward', got {side!r}.")


def _require_tolerance(tolerance: Any, most: int, start: int, least: int) -> None:
    if not isinstance(tolerance, Real) or not float(tolerance) > 0:
        raise InputError(f"tolerance must be positive, a relative standard error such as 0.01, got {tolerance!r}.")
    require_whole(0, start=start, most=most)
    if not least <= start <= most:
        raise InputError(f"start and most must satisfy {least} <= start <= most, got start={start} and most={most}.")
