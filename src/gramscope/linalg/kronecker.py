"""Kronecker products, applied one factor at a time."""

from functools import reduce
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.linalg.algebra import require_operators
from gramscope.linalg.elementary import as_operator, require_size
from gramscope.linalg.operator import LinearOperator


class Kronecker(LinearOperator):
    """``A₁ ⊗ A₂ ⊗ ... ⊗ A_m`` for any number of matrices or operators.

    With row-major flattening, ``(A ⊗ B) vec(X) = vec(A X Bᵀ)``; so each factor acts on its own axis of
    the unflattened vector, at the cost of the factors' products instead of that of ``∏ rows × ∏ cols``.
    The axes are the products of the factors' axes, unless ``rows`` or ``cols`` name them anew (needed
    where two factors use one name). Van Loan, "The ubiquitous Kronecker product", J. Comput. Appl.
    Math. 123 (2000).

    >>> import torch
    >>> A, B = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[2.0]])
    >>> Kronecker(A, B).dense().tolist()
    [[0.0, 2.0], [2.0, 0.0]]
    """

    def __init__(self, *factors: Tensor | LinearOperator, rows: Axes | None = None, cols: Axes | None = None) -> None:
        operators = tuple(as_operator(factor) for factor in factors)
        require_operators(operators, "Kronecker")
        row_count = reduce(mul, (factor.rows.size for factor in operators), 1)
        col_count = reduce(mul, (factor.cols.size for factor in operators), 1)
        if rows is None:
            rows = reduce(mul, (factor.rows for factor in operators), Axes())
        if cols is None:
            cols = reduce(mul, (factor.cols for factor in operators), Axes())
        super().__init__(
            require_size(rows, row_count, "rows", "the factors"),
            require_size(cols, col_count, "cols", "the factors"),
            dtype=operators[0].dtype,
            device=operators[0].device,
            symmetric=all(factor.symmetric for factor in operators) and rows.matches(cols),
        )
        self.factors = operators

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return _apply_along_axes(self.factors, x)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return _apply_along_axes(tuple(factor.adjoint() for factor in self.factors), x)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        # torch.kron takes views of its arguments and fails on a transposed one.
        return reduce(torch.kron, (factor.dense(block=block).contiguous() for factor in self.factors))


def _apply_along_axes(factors: tuple[LinearOperator, ...], x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
    tensor = x.reshape(*(factor.cols.size for factor in factors), x.shape[1])
    # Factors act on different axes and so commute: those that shrink the tensor most go first.
    by_growth = sorted(range(len(factors)), key=lambda i: factors[i].rows.size / max(factors[i].cols.size, 1))
    for axis in by_growth:
        tensor = _apply_along_axis(factors[axis], tensor, axis)
    return tensor.reshape(tensor.shape[:-1].numel(), x.shape[1])


def _apply_along_axis(factor: LinearOperator, tensor: Tensor, axis: int) -> Tensor:
    front = tensor.movedim(axis, 0)
    rest = front.shape[1:]
    columns = front.reshape(front.shape[0], rest.numel())
    return factor._matmat(columns).reshape(factor.rows.size, *rest).movedim(0, axis)
