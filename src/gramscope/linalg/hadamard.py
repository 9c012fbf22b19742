"""Entrywise product of a Gram matrix with an operator, without the Gram matrix."""

from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_counts
from gramscope.base.errors import InputError
from gramscope.linalg.contraction import contract
from gramscope.linalg.elementary import Dense, as_operator, require_matrix
from gramscope.linalg.operator import LinearOperator, require_same_kind


class HadamardGram(LinearOperator):
    """``K = (V Uᵀ) ∘ A``, with ``U = V`` where ``right`` is left out: the form of a layer's kernel.

    ``left`` V is (rows, rank), ``right`` U is (cols, rank), ``A`` a matrix or an operator (rows, cols).
    The identity ``(V Uᵀ) ∘ A = Σ_r diag(v_r) A diag(u_r)`` gives ``K X`` from ``rank · k`` products with
    ``A`` for k columns (Horn & Johnson, *Topics in Matrix Analysis*, section 5.1). Where that is more than
    ``A`` has columns, or ``A`` lies in memory, ``K`` is formed a few columns at a time instead. Both are
    exact, and neither holds a (rows, cols) Gram matrix. ``block`` bounds the columns in flight.

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
        return _product(self.left, self.operator, self.right, x, self.block)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        # ((V Uᵀ) ∘ A)ᵀ = (U Vᵀ) ∘ Aᵀ.
        inner = self.operator
        transposed = Dense(inner.matrix.mT) if isinstance(inner, Dense) else inner.adjoint()
        return _product(self.right, transposed, self.left, x, self.block)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return contract("row rank, col rank -> row col", self.left, self.right) * self.operator.dense(block=block)


def _product(left: Tensor, inner: LinearOperator, right: Tensor, x: Tensor, block: int) -> Tensor:
    rank, k = left.shape[1], x.shape[1]
    by_rank = rank * k <= inner.cols.size and not isinstance(inner, Dense)
    return (_by_rank if by_rank else _by_columns)(left, inner, right, x, block)


def _by_rank(left: Tensor, inner: LinearOperator, right: Tensor, x: Tensor, block: int) -> Tensor:
    total = x.new_zeros((left.shape[0], x.shape[1]))
    for ranks in _slices(left.shape[1], max(1, block // max(x.shape[1], 1))):
        weighted = contract("col rank, col k -> col rank k", right[:, ranks], x)
        products = inner._matmat(weighted.reshape(right.shape[0], weighted.shape[1] * x.shape[1]))
        products = products.reshape(left.shape[0], *weighted.shape[1:])
        total = total + contract("row rank, row rank k -> row k", left[:, ranks], products)
    return total


def _by_columns(left: Tensor, inner: LinearOperator, right: Tensor, x: Tensor, block: int) -> Tensor:
    total = x.new_zeros((left.shape[0], x.shape[1]))
    for cols in _slices(right.shape[0], block):
        if isinstance(inner, Dense):
            columns = inner.matrix[:, cols]
        else:
            columns = inner._matmat(inner._identity_columns(cols.start, cols.stop))
        kernel_columns = contract("row rank, col rank -> row col", left, right[cols]) * columns
        total = total + contract("row col, col k -> row k", kernel_columns, x[cols])
    return total


def _slices(size: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


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
