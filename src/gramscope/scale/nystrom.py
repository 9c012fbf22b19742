"""A randomised Nyström preconditioner for ``K + ridge·1``, from one pass over K."""

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.rng import gaussian, stream
from gramscope.linalg.arguments import require_symmetric
from gramscope.linalg.operator import LinearOperator


class NystromPreconditioner(LinearOperator):
    """``M = U (λ_r + ridge)(Λ + ridge)⁻¹ Uᵀ + (1 − U Uᵀ)``, with the Nyström approximation ``U Λ Uᵀ ≈ K`` of rank r.

    Conjugate gradients on ``(K + ridge·1) x = b`` then take a number of steps that depends on the eigenvalues of K
    beyond the r-th alone. Source: Frangella, Tropp & Udell 2021 (arXiv:2110.02820), algorithm 2.1 and eq. 5.3.

    >>> import gramscope as gs
    >>> K = gs.linalg.Diagonal(torch.tensor([100.0, 50.0, 1.0, 1.0]).double())
    >>> M = NystromPreconditioner.of(K, rank=2, ridge=1.0)
    >>> M.shape, len(M.values)
    ((4, 4), 2)
    """

    def __init__(self, basis: Float[Tensor, "n rank"], values: Float[Tensor, " rank"], ridge: float) -> None:
        super().__init__(len(basis), len(basis), dtype=basis.dtype, device=basis.device, symmetric=True)
        self.basis, self.values = basis, values
        self.weights = (values[-1] + ridge) / (values + ridge) - 1

    @classmethod
    @torch.no_grad()
    def of(cls, op: LinearOperator, rank: int, ridge: float, seed: int = 0) -> "NystromPreconditioner":
        """From one product of the positive semi-definite ``op`` with ``rank`` random columns."""
        require_symmetric(op, "a Nyström preconditioner")
        n = op.shape[0]
        probe = gaussian(n, min(rank, n), rng=stream(seed, "nystrom"), dtype=op.dtype, device=op.device)
        probe = torch.linalg.qr(probe).Q
        image = op.matmat(probe)
        # A small multiple of 1 keeps the Cholesky factor real, and is taken off again.
        shift = float(torch.finfo(op.dtype).eps) * float(torch.linalg.matrix_norm(image)) * n**0.5
        image = image + shift * probe
        factor = _cholesky(probe.mT @ image)
        half = torch.linalg.solve_triangular(factor, image.mT, upper=False).mT
        basis, singular, _ = torch.linalg.svd(half, full_matrices=False)
        return cls(basis, (singular.square() - shift).clamp_min(0.0), ridge)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return x + self.basis @ (self.weights[:, None] * (self.basis.mT @ x))

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return self._matmat(x)


def _cholesky(matrix: Float[Tensor, "rank rank"]) -> Float[Tensor, "rank rank"]:
    """The lower factor, of a matrix that rounding may have made a little indefinite."""
    even = (matrix + matrix.mT) / 2
    shift = 0.0
    for _ in range(20):
        factor, failed = torch.linalg.cholesky_ex(
            even + shift * torch.eye(len(even), dtype=even.dtype, device=even.device)
        )
        if not bool(failed):
            return factor
        shift = max(10 * shift, float(torch.finfo(even.dtype).eps) * float(even.diagonal().abs().max()))
    raise ValueError("a Nyström preconditioner needs a positive semi-definite operator, but this one is indefinite.")
