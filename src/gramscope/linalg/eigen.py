"""Extreme eigenvalues by Lanczos' method with thick restarts."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_choice, check_counts, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import TableResult
from gramscope.base.rng import gaussian, stream
from gramscope.linalg.arguments import default_tolerance, require_finite, require_symmetric
from gramscope.linalg.operator import LinearOperator

End = Literal["largest", "smallest", "both"]

# The projected matrix is diagonalised after this many steps more, as a share of its width: it costs little then.
LOOK_SHARE, LEAST_STEPS = 0.15, 2
# Directions kept at a restart beyond those wanted, as a share of the vectors that fit.
KEPT_SHARE = 0.35
# Products of one search for missed copies of eigenvalues: a share of those made so far, and at least so many.
SEARCH_SHARE, LEAST_SEARCH = 0.1, 4


@dataclass(frozen=True, repr=False)
class RitzPairs(TableResult, columns=("values", "residuals", "converged")):
    """Approximate eigenpairs, greatest first, each with its residual ``‖A v − λ v‖``.

    Some eigenvalue of A lies within ``residuals[i]`` of ``values[i]`` (A symmetric, ``‖v‖ = 1``; Parlett,
    *The Symmetric Eigenvalue Problem*, 4.5). ``converged`` says where the residual came under the
    tolerance times the greatest ``|λ|`` seen. It certifies eigenpairs, not that no other was missed.
    """

    values: Float64[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float64[Tensor, " k"]
    converged: Bool[Tensor, " k"]
    products: int

    @property
    def all_converged(self) -> bool:
        return bool(self.converged.all())

    def __repr__(self) -> str:
        first = ", ".join([f"{value:.4g}" for value in self.values[:4].tolist()] + ["..."] * (len(self.values) > 4))
        count = f"{int(self.converged.sum())} of {len(self.values)} converged"
        return f"RitzPairs({first}; {count}, {self.products} products)"


@torch.no_grad()
@exact_arithmetic()
def eigenvalues_top(
    op: LinearOperator,
    k: int,
    *,
    end: End = "largest",
    tol: float | None = None,
    max_products: int | None = None,
    max_basis: int | None = None,
    seed: int = 0,
) -> RitzPairs:
    """The ``k`` greatest (or least, or ``k`` at both ends) eigenpairs of a symmetric operator.

    Lanczos' method from a random vector, with full reorthogonalisation. When the basis holds ``max_basis`` vectors
    (default: ``max(2 w + 10, 30)`` for w wanted pairs), the best Ritz vectors are kept and the iteration goes on. One
    starting vector finds one vector of each eigenspace. So, for k > 1, once all wanted pairs have converged, a search
    for missed copies starts from a random direction orthogonal to them. It takes 10 % of the products made so far,
    and the iteration goes on if it meets an eigenvalue that belongs among the wanted ones. Copies of an eigenvalue
    well above the rest are found so; copies nearer to the next eigenvalue than a tenth of the spectrum may be missed.

    Pairs that miss ``tol · max|θ|`` within ``max_products`` (default: ``1000 + 50 k``) are returned and marked.
    Eigenvalues far closer together than the spectrum is wide converge slowly. Residuals come from the Lanczos
    relation, which holds to rounding. K. Wu & H. Simon, SIAM J. Matrix Anal. Appl. 22 (2000), algorithm 1.

    Returns :class:`RitzPairs`, greatest first: (k,) values, or (2k,) for ``end="both"``.

    >>> from gramscope.linalg import Diagonal
    >>> op = Diagonal(torch.tensor([3.0, 1.0, 3.0, 2.0, -1.0, 0.0], dtype=torch.float64))
    >>> eigenvalues_top(op, 2).values.round(decimals=8).tolist()
    [3.0, 3.0]
    >>> eigenvalues_top(op, 1, end="both").values.round(decimals=8).tolist()
    [3.0, -1.0]
    """
    require_symmetric(op, "eigenvalues_top")
    _require_count(op.cols.size, k, end)
    tol = default_tolerance(op.dtype) if tol is None else tol
    check_number(tol, "tol", least=0.0)
    wanted = 2 * k if end == "both" else k
    max_products = 1000 + 50 * k if max_products is None else max_products
    check_counts(wanted, max_products=max_products)
    limit = _width_limit(op.cols.size, wanted, max_basis)
    space = KrylovSpace(op, limit, stream(seed, "eigenvalues_top"))
    before, searches = None, 0  # the values found when the last search for missed ones began
    look = min(limit, wanted + LEAST_STEPS)
    while True:
        while space.width < look and space.products < max_products:
            space.expand()
        values, small, residuals = space.ritz()
        chosen = _at_ends(len(values), k, end)
        bound = tol * float(values.abs().max())
        converged = residuals[chosen] <= bound
        done = len(chosen) == wanted and bool(converged.all())
        # Of an extreme eigenvalue alone one copy is enough.
        # In a dense bulk a loose tol lets every search move the values a little: what counts as new grows.
        slack = bound * (1 + searches**2)
        complete = k == 1 or (before is not None and float((values[chosen] - before).abs().max()) <= slack)
        if (done and complete) or space.width == op.cols.size or space.products >= max_products:
            break
        if done:
            before, searches = values[chosen], searches + 1
            space.restart_afresh(before, small[:, chosen])
            look = wanted + max(LEAST_SEARCH, int(SEARCH_SHARE * space.products))
        else:
            if space.width == limit:
                kept = _at_ends(limit, k + int(KEPT_SHARE * (limit - wanted) / (wanted // k)), end)
                space.restart(values[kept], small[:, kept])
            look = space.width + max(LEAST_STEPS, int(LOOK_SHARE * space.width))
        look = min(limit, look)
    return RitzPairs(
        values=values[chosen].to(op.device),
        vectors=space.vectors(small[:, chosen]).mT,
        residuals=residuals[chosen].to(op.device),
        converged=converged.to(op.device),
        products=space.products,
    )


def _at_ends(count: int, k: int, end: End) -> Tensor:
    """Positions, in descending order of value, of ``k`` values at each end asked for."""
    top = range(min(k, count)) if end in ("largest", "both") else range(0)
    bottom = range(max(0, count - k), count) if end in ("smallest", "both") else range(0)
    return torch.tensor(sorted({*top, *bottom}), dtype=torch.long, device="cpu")


def _width_limit(n: int, wanted: int, max_basis: int | None) -> int:
    if max_basis is None:
        return min(n, max(2 * wanted + 10, 30))
    check_counts(1, max_basis=max_basis)
    if max_basis < min(n, wanted + 3):
        raise InputError(
            f"max_basis must be at least {min(n, wanted + 3)}, the wanted pairs and a few more, got {max_basis}. Ask "
            "for fewer pairs, or allow more memory."
        )
    return min(n, max_basis)


def _require_count(n: int, k: int, end: End) -> None:
    check_choice(end, "end", get_args(End))
    check_counts(1, k=k)
    most = n // 2 if end == "both" else n
    if most == 0:
        raise InputError(
            f"{end!r} eigenvalues need an operator of size at least {2 if end == 'both' else 1}, got one of size {n}. "
            "The one eigenvalue of a matrix of size one is op.dense()."
        )
    if k > most:
        raise InputError(
            f"k must be between 1 and {most} for {end!r} eigenvalues of an operator of size {n}, got {k}. "
            "For the whole spectrum use torch.linalg.eigvalsh(op.dense())."
        )


class KrylovSpace:
    """Rows ``Q`` of a preallocated basis with ``A Qᵀ = Qᵀ H + q rᵀ``; ``q`` is the vector of the next product.

    ``H`` is the projected matrix in float64 on the CPU. ``r`` holds one number, ``beta``, in its last place. The
    basis has the operator's own precision and one vector in each row, so that a step reads it in memory order.
    """

    def __init__(self, op: LinearOperator, limit: int, rng: torch.Generator) -> None:
        self.op, self.limit, self.rng = op, limit, rng
        self.basis = torch.zeros((limit + 1, op.cols.size), dtype=op.dtype, device=op.device)
        self.projected = torch.zeros((limit, limit), dtype=torch.float64, device="cpu")
        # What a row of Q lost when its coupling to an old q was dropped; part of its residual.
        self.dropped = torch.zeros(limit, dtype=torch.float64, device="cpu")
        self.width, self.products, self.beta, self.largest = 0, 0, 0.0, 0.0
        self._first_coupled = 0  # q is coupled to the rows from here on
        self._draw()

    def expand(self) -> None:
        """One product with ``q``, which joins the basis; what is orthogonal to the basis becomes the next ``q``.

        The rows that q is coupled to are projected out first, then all rows, where only rounding errors are left.
        These two products with the whole basis keep it orthonormal to working precision.
        """
        old, self.width = self.width, self.width + 1
        rows = self.basis[: self.width]
        coupled = rows[self._first_coupled :]
        image = self.op._matmat(rows[old][:, None])[:, 0].clone()
        overlap = coupled @ image
        image.addmv_(coupled.T, overlap, alpha=-1)
        column = rows @ image
        image.addmv_(rows.T, column, alpha=-1)
        column[self._first_coupled :] += overlap
        self.beta = float(torch.linalg.vector_norm(image, dtype=torch.float64))
        self.products += 1
        if not math.isfinite(self.beta):
            require_finite(image, self.op)
        found = column.to(device="cpu", dtype=torch.float64)
        self.projected[: self.width, old] = self.projected[old, : self.width] = found
        self.largest = max(self.largest, abs(float(found[-1])), self.beta)
        self._first_coupled = old
        # Below this the remainder is the rounding error of the product, not a direction of A.
        if (
            self.width == len(image)
            or self.beta <= 10 * len(image) ** 0.5 * torch.finfo(image.dtype).eps * self.largest
        ):
            self.beta = 0.0
            self._draw()
        else:
            torch.div(image, self.beta, out=self.basis[self.width])

    def ritz(self) -> tuple[Float64[Tensor, " width"], Float64[Tensor, "width width"], Float64[Tensor, " width"]]:
        """Ritz values, greatest first, their vectors in the basis, and their residuals ``‖A v − θ v‖``."""
        values, small = torch.linalg.eigh(self.projected[: self.width, : self.width])
        values, small = values.flip(0), small.flip(1)
        return values, small, self._residuals(small)

    def vectors(self, small: Float64[Tensor, "width k"]) -> Float[Tensor, "k n"]:
        return small.mT.to(self.basis) @ self.basis[: self.width]

    def restart(self, values: Float64[Tensor, " kept"], small: Float64[Tensor, "width kept"]) -> None:
        """Keep these Ritz vectors and ``q``, to which each of them is coupled."""
        kept, q = len(values), self.basis[self.width].clone()
        self.basis[:kept] = self.vectors(small)
        self.basis[kept] = q
        self.projected.zero_()
        self.projected.diagonal()[:kept] = values
        self.dropped[:kept] = small.mT @ self.dropped[: self.width]
        self.dropped[kept:] = 0
        self.width, self._first_coupled = kept, 0

    def restart_afresh(self, values: Float64[Tensor, " kept"], small: Float64[Tensor, "width kept"]) -> None:
        """Keep these Ritz vectors alone and go on with a random direction, which sees what ``q`` could not."""
        lost = self._residuals(small)
        self.restart(values, small)
        self.dropped[: self.width] = lost
        self._draw()

    def _residuals(self, small: Float64[Tensor, "width k"]) -> Float64[Tensor, " k"]:
        rounding = torch.finfo(self.basis.dtype).eps * self.largest
        found = torch.hypot(self.beta * small[-1], small.mT @ self.dropped[: self.width])
        return found.clamp(min=rounding)

    def _draw(self) -> None:
        """A random ``q``, orthogonal to the basis."""
        rows, n = self.basis[: self.width], self.basis.shape[1]
        if self.width == n:
            return
        q = gaussian(n, 1, rng=self.rng, dtype=self.basis.dtype, device=self.basis.device)[:, 0]
        for _ in range(2):  # the first pass leaves rounding errors of what it removed
            q = q - rows.T @ (rows @ q)
            q = q / torch.linalg.vector_norm(q)
        self.basis[self.width] = q
        self._first_coupled = self.width
