"""Leading singular triplets from a few products with random vectors."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError
from gramscope.base.rng import gaussian
from gramscope.linalg.arguments import require_operator, require_tolerance, require_whole, stream
from gramscope.linalg.contraction import contract
from gramscope.linalg.operator import LinearOperator, require_finite
from gramscope.linalg.orthogonal import norms, orthonormal_columns
from gramscope.linalg.scale import near_one


@dataclass(frozen=True)
class SingularTriplets:
    """``A v = σ u``, greatest first, with the residuals that show how far to trust them.

    ``residuals`` are ``√(‖A v - σ u‖² + ‖Aᵀ u - σ v‖²)`` of true products; ``converged`` says which are within
    ``tol · σ_max``. A triplet that has not converged reads low.
    """

    left: Float[Tensor, "rows k"]
    values: Float64[Tensor, " k"]
    right: Float[Tensor, "cols k"]
    residuals: Float64[Tensor, " k"]
    converged: Bool[Tensor, " k"]
    products: int
    power_steps: int
    seed: int
    dtype: torch.dtype
    device: torch.device

    @property
    def all_converged(self) -> bool:
        return bool(self.converged.all())


@torch.no_grad()
@exact_arithmetic()
def randomised_svd(
    op: LinearOperator,
    k: int,
    *,
    power_steps: int = 2,
    oversample: int = 8,
    tol: float = 1e-3,
    max_power_steps: int | None = None,
    seed: int = 0,
) -> SingularTriplets:
    """The ``k`` greatest singular triplets: an SVD of ``Qᵀ A``, Q an orthonormal basis of ``(A Aᵀ)^q A Ω``.

    Ω holds ``k + oversample`` random columns and q is ``power_steps``; each power step is orthonormalised. On a flat
    spectrum few steps read low (by a fifth at q = 1 on tangent kernels of states), so residuals are taken with true
    products. With ``max_power_steps`` more steps are made until all k meet ``tol · σ_max``; otherwise what is found is
    returned and marked. For a symmetric operator :func:`eigenvalues_top` finds the same more surely. Halko,
    Martinsson & Tropp, SIAM Rev. 53 (2011), algorithms 4.4 and 5.1.

    >>> from gramscope.linalg import Diagonal
    >>> found = randomised_svd(Diagonal(torch.tensor([5.0, 3.0, 1.0, 0.1], dtype=torch.float64)), 2)
    >>> found.values.round(decimals=6).tolist(), found.all_converged
    ([5.0, 3.0], True)
    """
    require_operator(op, "randomised_svd")
    rows, cols = op.shape
    require_whole(1, k=k)
    require_whole(0, power_steps=power_steps, oversample=oversample, max_power_steps=max_power_steps or 0)
    require_tolerance(tol)
    if k > min(rows, cols):
        raise InputError(f"k must be between 1 and {min(rows, cols)} for an operator of shape {op.shape}, got {k}.")
    width = min(k + oversample, rows, cols)
    rng = stream(seed, "randomised_svd")
    image = op.matmat(gaussian(cols, width, rng=rng, dtype=op.dtype, device=op.device))
    require_finite(image, op)
    op, image, scale = near_one(op, image)
    basis, spent, done = _basis(image), width, 0
    limit = max(power_steps, max_power_steps or 0)
    while True:
        if done >= power_steps:
            left, values, right = _small_svd(op, basis, k, seed)
            spent += basis.shape[1] + k
            residuals = _residuals(op, left, values, right)
            bound = tol * float(values.max()) if len(values) else 0.0
            converged = residuals <= bound
            if done >= limit or bool(converged.all()):
                return SingularTriplets(
                    left, values * scale, right, residuals * scale, converged, spent, done, seed, op.dtype, op.device
                )  # fmt: skip
        basis = _basis(op.matmat(_basis(op.adjoint().matmat(basis))))
        spent, done = spent + 2 * basis.shape[1], done + 1


def _basis(x: Float[Tensor, "n a"]) -> Float[Tensor, "n b"]:
    return orthonormal_columns(x, x[:, :0])


def _small_svd(
    op: LinearOperator, basis: Float[Tensor, "rows width"], k: int, seed: int
) -> tuple[Float[Tensor, "rows k"], Float64[Tensor, " k"], Float[Tensor, "cols k"]]:
    short = op.adjoint().matmat(basis)  # (cols, width) = (Qᵀ A)ᵀ
    v, sizes, u = torch.linalg.svd(short.double(), full_matrices=False)
    left = contract("n width, k width -> n k", basis, u[:k].to(op.dtype))
    right = v[:, :k].to(op.dtype)
    missing = k - left.shape[1]
    if missing > 0:  # the rank is lower than k: what is orthogonal to both ranges has the singular value 0
        left, right = _completed(left, k, seed, "left"), _completed(right, k, seed, "right")
        sizes = torch.cat([sizes, sizes.new_zeros(missing)])
    return left, sizes[:k], right


def _completed(basis: Float[Tensor, "n a"], k: int, seed: int, side: str) -> Float[Tensor, "n k"]:
    """Orthonormal columns made up to ``k`` with others, drawn at random."""
    n, have = basis.shape
    # A few more than are missing, of which the most independent are taken.
    drawn = gaussian(n, k - have + 8, rng=stream(seed, "null", side), dtype=basis.dtype, device=basis.device)
    return torch.cat([basis, orthonormal_columns(drawn, basis)[:, : k - have]], dim=1)


def _residuals(
    op: LinearOperator, left: Float[Tensor, "rows k"], values: Float64[Tensor, " k"], right: Float[Tensor, "cols k"]
) -> Float64[Tensor, " k"]:
    scaled = values.to(op.dtype)
    forward = norms(op.matmat(right) - left * scaled)
    backward = norms(op.adjoint().matmat(left) - right * scaled)
    return torch.hypot(forward, backward)
