"""Conjugate gradients for one or many right sides."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_counts, check_finite, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import TableResult
from gramscope.linalg.arguments import default_tolerance, require_finite, require_symmetric
from gramscope.linalg.elementary import Identity
from gramscope.linalg.operator import LinearOperator
from gramscope.linalg.orthogonal import inner, norms


@dataclass(frozen=True, repr=False)
class Solution(
    TableResult,
    shown=("all_converged", "iterations", "residuals", "products"),
    columns=("residuals", "iterations", "converged", "negative_curvature"),
):
    """What conjugate gradients found, column by column.

    ``residuals`` are the true ``‖b − A x‖ / ‖b‖``, from a last product with x. ``negative_curvature``
    marks the columns that met a direction with ``pᵀ A p <= 0``: there A is not positive definite, the
    iteration stopped, and x is the last point before it.
    """

    x: Float[Tensor, "n k"] | Float[Tensor, " n"]
    residuals: Float64[Tensor, " k"]
    iterations: Int[Tensor, " k"]
    converged: Bool[Tensor, " k"]
    negative_curvature: Bool[Tensor, " k"]
    products: int

    @property
    def all_converged(self) -> bool:
        return bool(self.converged.all())


@torch.no_grad()
@exact_arithmetic()
def conjugate_gradient(
    op: LinearOperator,
    b: Float[Tensor, "n k"] | Float[Tensor, " n"],
    *,
    preconditioner: LinearOperator | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Solution:
    """Solve ``A x = b`` for symmetric positive definite ``A``, until ``‖b − A x‖ <= tol ‖b‖``.

    Each column runs its own recurrence; the columns share only the products with A. The preconditioner
    ``M ≈ A⁻¹`` must be symmetric positive definite too. The recurrence's residual drifts from the true
    one, so a column counts as solved only after a fresh product confirms it, and resumes otherwise.
    ``max_iter`` defaults to ``10 n``. Hestenes & Stiefel, J. Res. Nat. Bur. Standards 49 (1952); Saad,
    *Iterative Methods for Sparse Linear Systems*, algorithm 9.1.

    >>> from gramscope.linalg import Diagonal
    >>> A = Diagonal(torch.tensor([2.0, 4.0], dtype=torch.float64))
    >>> solution = conjugate_gradient(A, torch.tensor([2.0, 2.0], dtype=torch.float64))
    >>> solution.x.tolist(), solution.all_converged
    ([1.0, 0.5], True)
    """
    columns = b[:, None] if b.ndim == 1 else b
    require_symmetric(op, "conjugate_gradient")
    op._check_operand(columns, ndim=2)
    check_finite(b, "b", "Nothing solves A x = b there; look for where it was divided by zero or overflowed.")
    if preconditioner is None:
        preconditioner = Identity(op.cols, dtype=op.dtype, device=op.device)
    require_symmetric(preconditioner, "conjugate_gradient's preconditioner")
    tol = default_tolerance(op.dtype) if tol is None else tol
    max_iter = 10 * op.cols.size if max_iter is None else max_iter
    check_number(tol, "tol", least=0.0)
    check_counts(0, max_iter=max_iter)
    sizes = norms(columns)
    x, residual = torch.zeros_like(columns), columns.clone()
    iterations = torch.zeros(columns.shape[1], dtype=torch.long, device=op.device)
    negative = torch.zeros_like(iterations, dtype=torch.bool)
    open_columns, products = sizes > 0, 0
    while bool(open_columns.any()):
        at = open_columns.nonzero()[:, 0]
        budget = max_iter - int(iterations[at].max())
        sweep = _sweep(op, preconditioner, residual[:, at], tol * sizes[at], budget)
        candidate = x[:, at] + sweep.x
        truth = columns[:, at] - op.matmat(candidate)
        before, after = norms(residual[:, at]), norms(truth)
        better = after < before
        x[:, at] = torch.where(better, candidate, x[:, at])
        residual[:, at] = torch.where(better, truth, residual[:, at])
        iterations[at] += sweep.iterations
        negative[at] = sweep.negative_curvature
        products += sweep.products + len(at)
        # A sweep that did not halve the true residual has reached what rounding allows.
        may_go_on = (after > tol * sizes[at]) & (after < before / 2) & ~negative[at] & (iterations[at] < max_iter)
        open_columns[at] = may_go_on
    relative = norms(residual) / torch.where(sizes > 0, sizes, 1.0)
    return Solution(
        x=x[:, 0] if b.ndim == 1 else x,
        residuals=relative,
        iterations=iterations,
        converged=relative <= tol,
        negative_curvature=negative,
        products=products,
    )


def _sweep(
    op: LinearOperator,
    preconditioner: LinearOperator,
    b: Float[Tensor, "n k"],
    target: Float64[Tensor, " k"],
    budget: int,
) -> Solution:
    """Plain conjugate gradients from zero, trusting the recurrence, at most ``budget`` steps a column."""
    x, residual = torch.zeros_like(b), b.clone()
    direction, slope = _preconditioned(preconditioner, residual)
    steps = torch.zeros(b.shape[1], dtype=torch.long, device=b.device)
    negative = torch.zeros_like(steps, dtype=torch.bool)
    live, products = norms(residual) > target, 0
    for _ in range(budget):
        at = live.nonzero()[:, 0]
        if len(at) == 0:
            break
        image = op.matmat(direction[:, at])
        require_finite(image, op)
        products += len(at)
        curvature = inner(direction[:, at], image)
        negative[at] = curvature <= 0
        live[at[curvature <= 0]] = False
        at, image, curvature = at[curvature > 0], image[:, curvature > 0], curvature[curvature > 0]
        length = (slope[at] / curvature).to(b.dtype)
        x[:, at] += length * direction[:, at]
        residual[:, at] -= length * image
        steps[at] += 1
        steepest, new_slope = _preconditioned(preconditioner, residual[:, at])
        direction[:, at] = steepest + (new_slope / slope[at]).to(b.dtype) * direction[:, at]
        slope[at] = new_slope
        live[at] = norms(residual[:, at]) > target[at]
    return Solution(x, norms(residual), steps, ~live & ~negative, negative, products)


def _preconditioned(
    preconditioner: LinearOperator, residual: Float[Tensor, "n k"]
) -> tuple[Float[Tensor, "n k"], Float64[Tensor, " k"]]:
    """``M r`` and ``rᵀ M r``, which must be positive."""
    steepest = preconditioner.matmat(residual)
    slope = inner(residual, steepest)
    if bool(((slope <= 0) & (norms(residual) > 0)).any()):
        raise InputError(
            f"the preconditioner M must be positive definite, got rᵀ M r = {float(slope.min()):.3g}. "
            "Use one that approximates the inverse of the operator, e.g. Diagonal(1 / diagonal)."
        )
    return steepest, slope
