"""Entrywise product of a Gram matrix with an operator, without the Gram matrix."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_counts
from gramscope.base.errors import InputError
from gramscope.linalg.contraction import contract
from gramscope.linalg.elementary import as_operator, require_matrix
from gramscope.linalg.operator import LinearOperator, require_same_kind


class HadamardGram(LinearOperator):
    """``K = (V Uᵀ) ∘ A``, with ``U = V`` where ``right`` is left out: the form of a layer's kernel.

    ``left`` V is (rows, rank), ``right`` U is (cols, rank), ``A`` a matrix or an operator (rows, cols).
    ``(V Uᵀ) ∘ A = Σ_r diag(v_r) A diag(u_r)``, so that ``K X`` takes ``rank · k`` products with ``A`` for k columns,
    ``block`` at a time (Horn & Johnson, *Topics in Matrix Analysis*, section 5.1). No (rows, cols) matrix is held; if
    one fits in memory and many products are wanted, ``Dense(K.dense())`` is faster.

    >>> import torch
    >>> V, A = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    >>> HadamardGram(V, A).dense().tolist()
    [[1.0, 2.0], [0.0, 4.0]]
    """

    def __init__(
        self,
        left: Float[Tensor, "rows rank"],
        operator: Tensor | LinearOperator,
        right: Float[Tensor, "cols rank"] | None = None,
        *,
        block: int = 256,
    ) -> None:
        inner = as_operator(operator)
        symmetric = right is None and inner.symmetric
        right = left if right is None else right
        _require_shapes(left, right, inner)
        check_counts(1, block=block)
        super().__init__(inner.rows, inner.cols, dtype=inner.dtype, device=inner.device, symmetric=symmetric)
        self.left, self.right, self.operator, self.block = left, right, inner, block

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self._product(self.left, self.operator._matmat, self.right, x)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return self._product(self.right, self.operator._adjoint_matmat, self.left, x)  # ((V Uᵀ) ∘ A)ᵀ = (U Vᵀ) ∘ Aᵀ

    def _product(self, left: Tensor, matmat: Callable[[Tensor], Tensor], right: Tensor, x: Tensor) -> Tensor:
        """``Σ_r diag(v_r) A diag(u_r) X``."""
        total, k = x.new_zeros(len(left), x.shape[1]), x.shape[1]
        step = max(1, self.block // max(k, 1))
        for v, u in zip(left.split(step, dim=1), right.split(step, dim=1), strict=True):
            weighted = contract("col rank, col k -> col rank k", u, x)
            products = matmat(weighted.flatten(1)).unflatten(1, weighted.shape[1:])
            total = total + contract("row rank, row rank k -> row k", v, products)
        return total

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return contract("row rank, col rank -> row col", self.left, self.right) * self.operator.dense(block=block)


def _require_shapes(left: Tensor, right: Tensor, inner: LinearOperator) -> None:
    require_matrix(left, "left")
    require_matrix(right, "right")
    if (left.shape[0], right.shape[0]) != inner.shape or left.shape[1] != right.shape[1]:
        raise InputError(
            f"left must be ({inner.rows.size}, rank) and right ({inner.cols.size}, rank) to match rows "
            f"{inner.rows!r} and cols {inner.cols!r}, got {tuple(left.shape)} and {tuple(right.shape)}. "
            "A rectangular operator needs both; repeat a row of V for every output it serves."
        )
    require_same_kind("left, right and the operator", left, right, inner)
