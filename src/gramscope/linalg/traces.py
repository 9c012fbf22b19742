"""Random estimates of a trace from products alone, with their standard errors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_counts
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import Distribution, probes
from gramscope.linalg.arguments import require_operator, stream
from gramscope.linalg.intervals import half_widths, rounding
from gramscope.linalg.operator import LinearOperator, require_finite, require_square
from gramscope.linalg.orthogonal import inner, norms, orthonormal_columns, project_out


@dataclass(frozen=True, repr=False)
class TraceEstimate(Result):
    """A random estimate of a number, how far it may be off, and how it was made.

    ``standard_error`` is one standard deviation of ``value``, itself estimated from ``samples`` random numbers, and no
    less than rounding. From few samples it is rough: use :meth:`interval`. ``products`` with the operator were made;
    ``samples`` is None where there are as many. Random vectors are drawn from ``distribution`` at ``seed``.
    """

    shown: ClassVar[tuple[str, ...]] = ("value", "standard_error", "method", "products")

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
    symmetric part S, so a diagonal operator is met exactly. ``block`` products are made at a time; the
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
        image = _finite_product(op, z)
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
    image = _finite_product(op, draw_probes(op, sketch, distribution, rng))
    basis = orthonormal_columns(image)
    basis_image = _finite_product(op, basis)
    known, floor = float(inner(basis, basis_image).sum()), rounding(basis, basis_image)
    spent, rank = sketch + basis.shape[1], basis.shape[1]
    if rank == n:
        return TraceEstimate(known, floor, spent, seed, "hutchpp", distribution, op.dtype, op.device, 0)
    left = products - 2 * sketch
    z = project_out(draw_probes(op, left, distribution, rng), basis)
    if distribution == "sphere":
        z = z * ((n - rank) ** 0.5 / norms(z)).to(z.dtype)
    image = _finite_product(op, z)
    value, error = mean_and_error(inner(z, image))
    error = max(error, floor + rounding(z, image) / left)
    kind = (op.dtype, op.device)
    return TraceEstimate(known + value, error, spent + left, seed, "hutchpp", distribution, *kind, left)


def draw_probes(op: LinearOperator, k: int, distribution: Distribution, rng: torch.Generator) -> Float[Tensor, "n k"]:
    """``k`` probes of the operator's size, dtype and device."""
    return probes(op.cols.size, k, distribution, rng=rng, dtype=op.dtype, device=op.device)


def mean_and_error(samples: Float64[Tensor, " m"]) -> tuple[float, float]:
    """The mean and its standard error, ``std / √m`` with the unbiased variance."""
    return float(samples.mean()), float(samples.std(correction=1)) / len(samples) ** 0.5


def require_estimate(op: LinearOperator, products: int, least: int, method: str) -> None:
    """Raise unless there is a square operator, and products enough."""
    require_operator(op, method)
    require_square(op, "a trace")
    require_budget(products, least, method)


def require_budget(products: int, least: int, method: str) -> None:
    """Raise unless there are products enough for an estimate and its error."""
    check_counts(0, products=products)
    if products < least:
        raise InputError(
            f"{method} needs products >= {least} to estimate a value and its standard error, got {products}. "
            "Allow more, or take op.dense().trace() of a small operator."
        )


def _finite_product(op: LinearOperator, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    product = op.matmat(x)
    require_finite(product, op)
    return product
