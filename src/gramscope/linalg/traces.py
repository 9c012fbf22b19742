"""Random estimates of a trace from products alone, with their standard errors."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_choice, check_counts
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import Distribution, probes, stream
from gramscope.linalg.arguments import require_finite, require_operator, require_square
from gramscope.linalg.intervals import half_widths, rounding, rounding_unit
from gramscope.linalg.operator import LinearOperator
from gramscope.linalg.orthogonal import inner, norms, orthonormal_columns, project_out

Side = Literal["reverse", "forward"]


@dataclass(frozen=True, repr=False)
class TraceEstimate(Result, shown=("value", "standard_error", "method", "products")):
    """A random estimate of a number, how far it may be off, and how it was made.

    ``standard_error`` is one standard deviation of ``value``, itself estimated from ``samples`` random numbers, and no
    less than rounding. From few samples it is rough: use :meth:`interval`. ``products`` with the operator were made;
    ``samples`` is None where there are as many. Random vectors are drawn from ``distribution`` at ``seed``.
    """

    value: float
    standard_error: float
    products: int
    seed: int
    method: str
    distribution: str
    dtype: torch.dtype
    device: torch.device
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
        return f"{self.value:.6g} ± {self.standard_error:.2g} ({self.method}, {self.products} products)"


@torch.no_grad()
@exact_arithmetic()
def hutchinson(
    op: LinearOperator,
    products: int,
    *,
    distribution: Distribution = "rademacher",
    seed: int = 0,
    block: int = 64,
) -> TraceEstimate:
    """``tr A ≈ (1/m) Σ_i z_iᵀ A z_i`` for m random vectors with ``E[z zᵀ] = I``.

    Unbiased for any square A. With random signs the variance is ``2 Σ_{i≠j} S_ij² / m`` for the
    symmetric part S, so a diagonal operator is exact. ``block`` products are made at a time; the
    result does not depend on it. Girard, Numer. Math. 56 (1989); Hutchinson, Commun. Stat. Simul. 18 (1989).

    >>> from gramscope.linalg import Diagonal
    >>> print(hutchinson(Diagonal(torch.tensor([1.0, 2.0, 3.0])), products=4))      # exact but for rounding
    6 ± 1.5e-06 (hutchinson, 4 products)
    """
    require_estimate(op, products, 2, "hutchinson")
    check_counts(1, block=block)
    rng = stream(seed, "hutchinson")
    samples, floor = [], 0.0
    for start in range(0, products, block):
        z = draw_probes(op, min(block, products - start), distribution, rng)
        image = finite_product(op, z)
        samples.append(inner(z, image))
        floor += rounding(z, image) / products
    value, error = mean_and_error(torch.cat(samples))
    error = max(error, floor)
    return TraceEstimate(value, error, products, seed, "hutchinson", distribution, op.dtype, op.device)


@torch.no_grad()
@exact_arithmetic()
def hutchpp(
    op: LinearOperator, products: int, *, distribution: Distribution = "rademacher", seed: int = 0
) -> TraceEstimate:
    """``tr A = tr(Qᵀ A Q) + tr((I − QQᵀ) A (I − QQᵀ))``: the first exactly, the second by Hutchinson.

    A third of the products each finds the range (Q spans ``A S`` for a random S), takes the exact trace on
    it, and samples the rest; for a positive semidefinite A the error falls as 1/products, not as its
    square root. Probes on the sphere are drawn on that of the complement of Q. Unbiased given Q, and the
    standard error is that of the sampled part. Meyer, Musco, Musco & Woodruff, "Hutch++: optimal
    stochastic trace estimation", SOSA 2021, algorithm 1.

    >>> from gramscope.linalg import LowRank
    >>> estimate = hutchpp(LowRank(torch.ones(8, 1, dtype=torch.float64)), products=9)
    >>> round(estimate.value, 9), estimate.standard_error < 1e-9
    (8.0, True)
    """
    require_estimate(op, products, 6, "hutchpp")
    n, rng = op.cols.size, stream(seed, "hutchpp")
    sketch = min(products // 3, n)
    image = finite_product(op, draw_probes(op, sketch, distribution, rng))
    basis = orthonormal_columns(image)
    basis_image = finite_product(op, basis)
    known, floor = float(inner(basis, basis_image).sum()), rounding(basis, basis_image)
    spent, rank = sketch + basis.shape[1], basis.shape[1]
    if rank == n:
        return TraceEstimate(known, floor, spent, seed, "hutchpp", distribution, op.dtype, op.device, 0)
    left = products - 2 * sketch
    z = project_out(draw_probes(op, left, distribution, rng), basis)
    if distribution == "sphere":
        z = z * ((n - rank) ** 0.5 / norms(z)).to(z.dtype)
    image = finite_product(op, z)
    value, error = mean_and_error(inner(z, image))
    error = max(error, floor + rounding(z, image) / left)
    kind = (op.dtype, op.device)
    return TraceEstimate(known + value, error, spent + left, seed, "hutchpp", distribution, *kind, left)


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
    forward side. Hazelden 2025 (arXiv:2511.10796).

    >>> from gramscope.linalg import Dense
    >>> J = Dense(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    >>> print(one_sided_trace(J, products=4))      # exact but for rounding
    25 ± 6e-06 (reverse, 4 products)
    """
    require_operator(jacobian, "one_sided_trace")
    check_choice(side, "side", get_args(Side))
    check_counts(1, block=block)
    require_budget(products, 2, "one_sided_trace")
    op = jacobian.adjoint() if side == "reverse" else jacobian
    rng, squares = stream(seed, "one_sided", side), []
    for start in range(0, products, block):
        image = finite_product(op, draw_probes(op, min(block, products - start), distribution, rng))
        squares.append(norms(image) ** 2)
    value, error = mean_and_error(torch.cat(squares))
    error = max(error, rounding_unit(op.dtype, max(op.shape)) * value)
    return TraceEstimate(value, error, products, seed, side, distribution, op.dtype, op.device)


def draw_probes(op: LinearOperator, k: int, distribution: Distribution, rng: torch.Generator) -> Float[Tensor, "n k"]:
    """``k`` probes of the operator's size, dtype and device."""
    return probes(op.cols.size, k, distribution, rng=rng, dtype=op.dtype, device=op.device)


def mean_and_error(samples: Float64[Tensor, " m"]) -> tuple[float, float]:
    """The mean and its standard error, ``std / √m`` with the unbiased variance."""
    return float(samples.mean()), float(samples.std(correction=1)) / len(samples) ** 0.5


def require_estimate(op: LinearOperator, products: int, least: int, method: str) -> None:
    """Raise unless there is a square operator, and products enough."""
    require_square(op, method)
    require_budget(products, least, method)


def require_budget(products: int, least: int, method: str) -> None:
    """Raise unless there are products enough for an estimate and its error."""
    check_counts(0, products=products)
    if products < least:
        raise InputError(
            f"{method} needs products >= {least} to estimate a value and its standard error, got {products}. "
            "Allow more, or take op.dense().trace() of a small operator."
        )


def finite_product(op: LinearOperator, x: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
    """``A x``; raise if it holds NaN or infinity, which no estimate recovers from."""
    product = op.matmat(x)
    require_finite(product, op)
    return product
