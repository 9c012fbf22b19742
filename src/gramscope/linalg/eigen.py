"""Extreme eigenvalues by block Krylov iteration with restarts."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError
from gramscope.base.rng import gaussian
from gramscope.linalg.arguments import require_operator, require_tolerance, require_whole, stream
from gramscope.linalg.contraction import contract
from gramscope.linalg.lanczos import RitzPairs, default_tolerance
from gramscope.linalg.operator import LinearOperator, require_finite, require_symmetric
from gramscope.linalg.orthogonal import gram, norms, orthonormal_columns
from gramscope.linalg.scale import near_one

End = Literal["largest", "smallest", "both"]


@dataclass(frozen=True)
class _Subspace:
    """An orthonormal basis Q, its image A Q and the projected matrix H = Qᵀ A Q."""

    basis: Float[Tensor, "n width"]
    image: Float[Tensor, "n width"]
    projected: Float64[Tensor, "width width"]

    def extended(self, fresh: Float[Tensor, "n block"], image: Float[Tensor, "n block"]) -> "_Subspace":
        basis = torch.cat([self.basis, fresh], dim=1)
        column = gram(basis, image)
        old = self.basis.shape[1]
        # The block on the diagonal is symmetric up to rounding; the average keeps eigh from choosing a side.
        corner = (column[old:] + column[old:].mT) / 2
        top = torch.cat([self.projected, column[:old]], dim=1)
        bottom = torch.cat([column[:old].mT, corner], dim=1)
        return _Subspace(basis, torch.cat([self.image, image], dim=1), torch.cat([top, bottom]))

    def ritz(self) -> tuple[Float64[Tensor, " width"], Float64[Tensor, "width width"]]:
        values, small = torch.linalg.eigh(self.projected)
        return values.flip(0), small.flip(1)

    def residuals(self, values: Float64[Tensor, " k"], small: Float64[Tensor, "width k"]) -> Float[Tensor, "n k"]:
        return _combine(self.image, small) - _combine(self.basis, small * values)

    def rotated(self, small: Float64[Tensor, "width kept"], values: Float64[Tensor, " kept"]) -> "_Subspace":
        return _Subspace(_combine(self.basis, small), _combine(self.image, small), torch.diag(values))


@torch.no_grad()
@exact_arithmetic()
def eigenvalues_top(
    op: LinearOperator,
    k: int,
    *,
    end: End = "largest",
    tol: float | None = None,
    max_iter: int = 200,
    max_basis: int | None = None,
    oversample: int = 4,
    seed: int = 0,
) -> RitzPairs:
    """The ``k`` greatest (or least, or ``k`` at both ends) eigenpairs of a symmetric operator.

    Rayleigh-Ritz on a block Krylov space: from a random block of ``k + oversample`` columns (twice that for
    both ends) the space grows by the residuals ``A v − θ v`` of the wanted Ritz pairs, which span the next
    Krylov block; when ``max_basis`` wide it is thinned to the best half. A block as wide as the number wanted
    finds every copy of a multiple eigenvalue. The residuals returned come from a last product with the
    vectors themselves, and pairs that miss ``tol · max|θ|`` within ``max_iter`` blocks are returned and
    marked, never hidden: eigenvalues far closer together than the spectrum is wide converge slowly. Golub &
    Underwood (1977); Knyazev, SIAM J. Sci. Comput. 23 (2001); on the restart Stathopoulos & Saad, ETNA 7 (1998).

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
    n = op.cols.size
    _require_count(n, k, end, oversample)
    block = k + oversample
    sides = 2 if end == "both" else 1
    width = min(n, block * sides)
    limit = _width_limit(width, max_basis)
    tol = default_tolerance(op.dtype) if tol is None else tol
    require_tolerance(tol)
    fresh = gaussian(n, width, rng=stream(seed, "eigenvalues_top"), dtype=op.dtype, device=op.device)
    space = _Subspace(fresh[:, :0], fresh[:, :0], torch.zeros((0, 0), dtype=torch.float64, device=op.device))
    iterations, products, scale = 0, 0, 1.0
    while True:
        fresh = orthonormal_columns(fresh, space.basis)
        if fresh.shape[1]:
            image = op.matmat(fresh)
            require_finite(image, op)
            if iterations == 0:
                op, image, scale = near_one(op, image)
            space = space.extended(fresh, image)
            iterations, products = iterations + 1, products + fresh.shape[1]
        values, small = space.ritz()
        bound = tol * float(values.abs().max())
        tracked = _at_ends(len(values), block, end)
        residuals = space.residuals(values[tracked], small[:, tracked])
        open_pairs = norms(residuals) > bound
        wanted = _at_ends(len(values), k, end)
        done = not bool(open_pairs[torch.isin(tracked, wanted)].any())
        # Without fresh directions the space is invariant to rounding, and more blocks would add nothing.
        if done or iterations >= max_iter or fresh.shape[1] == 0:
            return _verified(op, space, values[wanted], small[:, wanted], bound, scale, iterations, products)
        if space.basis.shape[1] + int(open_pairs.sum()) > limit:
            kept = _at_ends(len(values), limit // 2 // sides, end)
            space = space.rotated(small[:, kept], values[kept])
        fresh = residuals[:, open_pairs]


def _verified(
    op: LinearOperator,
    space: _Subspace,
    values: Float64[Tensor, " k"],
    small: Float64[Tensor, "width k"],
    bound: float,
    scale: float,
    iterations: int,
    products: int,
) -> RitzPairs:
    """The pairs with the residuals of a last, true product: the images carried along were recombined."""
    vectors = _combine(space.basis, small)
    residuals = norms(op.matmat(vectors) - vectors * values.to(op.dtype))
    return RitzPairs(
        values=values * scale,
        vectors=vectors,
        residuals=residuals * scale,
        converged=residuals <= bound,
        iterations=iterations,
        products=products + len(values),
    )


def _combine(columns: Float[Tensor, "n width"], small: Float64[Tensor, "width k"]) -> Float[Tensor, "n k"]:
    return contract("n width, width k -> n k", columns, small.to(columns.dtype))


def _at_ends(count: int, k: int, end: End) -> Tensor:
    """Positions, in descending order of value, of ``k`` values at each end asked for."""
    top = range(min(k, count)) if end in ("largest", "both") else range(0)
    bottom = range(max(0, count - k), count) if end in ("smallest", "both") else range(0)
    return torch.tensor(sorted({*top, *bottom}), dtype=torch.long, device="cpu")


def _width_limit(width: int, max_basis: int | None) -> int:
    if max_basis is None:
        return max(8 * width, 100)
    if max_basis < 3 * width:
        raise ValueError(
            f"max_basis must be at least {3 * width}, to keep a block and a half and add another, got {max_basis}. "
            "Ask for fewer pairs, less oversample, or allow more memory."
        )
    return max_basis


def _require_count(n: int, k: int, end: End, oversample: int) -> None:
    if end not in ("largest", "smallest", "both"):
        raise InputError(f"end must be 'largest', 'smallest' or 'both', got {end!r}. Choose one of the three.")
    require_whole(0, oversample=oversample)  # a few extra columns speed convergence
    require_whole(1, k=k)
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
