"""Lanczos with full reorthogonalisation: a tridiagonal picture of a symmetric operator."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError
from gramscope.base.rng import gaussian
from gramscope.linalg.arguments import require_operator, require_tolerance, require_whole, stream
from gramscope.linalg.contraction import contract
from gramscope.linalg.operator import LinearOperator, require_finite, require_symmetric
from gramscope.linalg.orthogonal import project_out
from gramscope.linalg.scale import column_scales, near_one


@dataclass(frozen=True)
class Tridiagonal:
    """``A Q = Q T + β q eᵀ``: what ``steps`` of Lanczos know of A.

    ``T`` has ``diagonal`` and ``off_diagonal``, ``basis`` is Q, ``residual`` is β. ``invariant`` says
    that β vanished to rounding, so that the span of Q is mapped to itself and T's eigenvalues are A's.
    """

    diagonal: Float64[Tensor, " steps"]
    off_diagonal: Float64[Tensor, " steps-1"]
    basis: Float[Tensor, "n steps"]
    residual: float
    invariant: bool

    def matrix(self) -> Float64[Tensor, "steps steps"]:
        """T, written out."""
        off = torch.diag(self.off_diagonal, 1)
        return torch.diag(self.diagonal) + off + off.mT


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs, greatest first, each with its residual ``‖A v − λ v‖``.

    Some eigenvalue of A lies within ``residuals[i]`` of ``values[i]`` (A symmetric, ``‖v‖ = 1``; Parlett,
    *The Symmetric Eigenvalue Problem*, 4.5). ``converged`` says where the residual came under the
    tolerance times the greatest ``|λ|`` seen. It certifies eigenpairs, not that no other was missed.
    """

    values: Float64[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float64[Tensor, " k"]
    converged: Bool[Tensor, " k"]
    iterations: int
    products: int

    @property
    def all_converged(self) -> bool:
        return bool(self.converged.all())


@torch.no_grad()
@exact_arithmetic()
def tridiagonalise(op: LinearOperator, steps: int, *, start: Float[Tensor, " n"]) -> Tridiagonal:
    """Build ``T = Qᵀ A Q`` on the Krylov space of ``start, A start, A² start, ...``.

    Each new vector is orthogonalised against all before it, twice, since the bare three-term recurrence
    loses orthogonality as soon as a Ritz value converges (Golub & Van Loan, *Matrix Computations*, 4th
    ed., 10.3). Fewer than ``steps`` steps are made if the space is invariant before.

    >>> from gramscope.linalg import Diagonal
    >>> T = tridiagonalise(Diagonal(torch.tensor([1.0, 3.0])), 5, start=torch.tensor([1.0, 1.0]))
    >>> T.matrix().round(decimals=5).tolist(), T.invariant
    ([[2.0, 1.0], [1.0, 2.0]], True)
    """
    known, scale = _tridiagonal(op, steps, start)
    return replace(
        known,
        diagonal=known.diagonal * scale,
        off_diagonal=known.off_diagonal * scale,
        residual=known.residual * scale,
    )


def _tridiagonal(op: LinearOperator, steps: int, start: Float[Tensor, " n"]) -> tuple[Tridiagonal, float]:
    """That of A divided by a power of two, and the power."""
    _require_start(op, start, steps)
    eps = torch.finfo(op.dtype).eps
    n = op.cols.size
    steps = min(steps, n)
    basis = torch.zeros((n, steps), dtype=op.dtype, device=op.device)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    start = start / column_scales(start[:, None]).to(start.dtype)
    vector, greatest, beta, scale = start / torch.linalg.vector_norm(start), 0.0, 0.0, 1.0
    for step in range(steps):
        basis[:, step] = vector
        image = op.matvec(vector)
        require_finite(image, op)
        if step == 0:
            op, columns, scale = near_one(op, image[:, None])
            image = columns[:, 0]
        greatest = max(greatest, float(torch.linalg.vector_norm(image)))
        diagonal.append(float(torch.dot(vector.double(), image.double())))
        fresh = project_out(image[:, None], basis[:, : step + 1])[:, 0]
        beta = float(torch.linalg.vector_norm(fresh, dtype=torch.float64))
        # Below this the remainder is the rounding error of the product, not a direction of A.
        if beta <= 10 * n**0.5 * eps * greatest:
            break
        off_diagonal.append(beta)
        vector = fresh / beta
    made = len(diagonal)
    known = Tridiagonal(
        diagonal=torch.tensor(diagonal, dtype=torch.float64, device=op.device),
        off_diagonal=torch.tensor(off_diagonal[: made - 1], dtype=torch.float64, device=op.device),
        basis=basis[:, :made],
        residual=beta,
        invariant=len(off_diagonal) < made,
    )
    return known, scale


@torch.no_grad()
@exact_arithmetic()
def lanczos(
    op: LinearOperator,
    steps: int,
    *,
    start: Float[Tensor, " n"] | None = None,
    seed: int = 0,
    tol: float | None = None,
) -> RitzPairs:
    """All Ritz pairs of ``steps`` Lanczos steps: ``T s = θ s``, ``v = Q s``, residual ``β |s_last|``.

    The extreme pairs converge first. One starting vector finds one vector of each eigenspace; for
    multiple eigenvalues use :func:`eigenvalues_top`. ``tol`` defaults to the rounding unit to the power
    2/3. Lanczos, J. Res. Nat. Bur. Standards 45 (1950); Parlett, *The Symmetric Eigenvalue Problem*, 13.

    >>> from gramscope.linalg import Diagonal
    >>> pairs = lanczos(Diagonal(torch.tensor([5.0, 1.0, 2.0], dtype=torch.float64)), steps=3)
    >>> pairs.values.round(decimals=8).tolist(), pairs.all_converged
    ([5.0, 2.0, 1.0], True)
    """
    require_operator(op, "Lanczos")
    tol = default_tolerance(op.dtype) if tol is None else tol
    require_tolerance(tol)
    if start is None:
        rng = stream(seed, "lanczos")
        start = gaussian(op.cols.size, 1, rng=rng, dtype=op.dtype, device=op.device)[:, 0]
    known, scale = _tridiagonal(op, steps, start)
    values, small = torch.linalg.eigh(known.matrix())
    values, small = values.flip(0), small.flip(1)
    residuals = known.residual * small[-1].abs()
    vectors = contract("n step, step pair -> n pair", known.basis, small.to(op.dtype))
    return RitzPairs(
        values=values * scale,
        vectors=vectors,
        residuals=residuals * scale,
        converged=residuals <= tol * values.abs().max(),
        iterations=len(values),
        products=len(values),
    )


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative residual to ask for: 4e-11 in float64, 2e-5 in float32.

    The two-thirds power leaves room for the rounding of the products, which no iteration can go below.
    """
    return float(torch.finfo(dtype).eps ** (2 / 3))


def _require_start(op: LinearOperator, start: Tensor, steps: int) -> None:
    require_operator(op, "Lanczos")
    require_symmetric(op, "Lanczos")
    require_whole(1, steps=steps)
    if op.cols.size == 0:
        raise InputError(f"Lanczos needs an operator of size at least 1, got {op!r}. An empty one has no spectrum.")
    op._check_operand(start, ndim=1)
    peak = float(torch.linalg.vector_norm(start, float("inf")))
    if not 0 < peak < float("inf"):
        raise InputError(
            f"start must be a finite vector that is not zero, got one with a greatest entry of {peak}. "
            "Leave it out of lanczos(...) for a random one."
        )
