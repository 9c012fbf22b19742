"""Extreme eigenvalues by Lanczos' method with thick restarts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_counts, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import TableResult
from gramscope.linalg.arguments import default_tolerance, require_operator, stream
from gramscope.linalg.krylov_space import KrylovSpace
from gramscope.linalg.operator import LinearOperator, require_symmetric

End = Literal["largest", "smallest", "both"]

# The projected matrix is diagonalised after this many steps more, as a share of its width: it costs little then.
LOOK_SHARE, LEAST_STEPS = 0.15, 2
# Directions kept at a restart beyond those wanted, as a share of the room there is.
KEPT_SHARE = 0.35
# Products of one search for missed copies of eigenvalues: a share of those made so far, and at least so many.
SEARCH_SHARE, LEAST_SEARCH = 0.1, 4


@dataclass(frozen=True, repr=False)
class RitzPairs(TableResult):
    """Approximate eigenpairs, greatest first, each with its residual ``‖A v − λ v‖``.

    Some eigenvalue of A lies within ``residuals[i]`` of ``values[i]`` (A symmetric, ``‖v‖ = 1``; Parlett,
    *The Symmetric Eigenvalue Problem*, 4.5). ``converged`` says where the residual came under the
    tolerance times the greatest ``|λ|`` seen. It certifies eigenpairs, not that no other was missed.
    """

    columns: ClassVar[tuple[str, ...]] = ("values", "residuals", "converged")

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
    starting vector meets one vector of each eigenspace. So, for k > 1, once all wanted pairs have converged, a search
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
    require_operator(op, "eigenvalues_top")
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
    if end not in ("largest", "smallest", "both"):
        raise InputError(f"end must be 'largest', 'smallest' or 'both', got {end!r}. Choose one of the three.")
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
