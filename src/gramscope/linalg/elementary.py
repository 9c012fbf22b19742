"""Operators given by their entries or by two callables: what the rest is built from."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.base.errors import InputError
from gramscope.linalg.contraction import contract
from gramscope.linalg.operator import LinearOperator, require_same_kind


class Dense(LinearOperator):
    """A matrix held entry by entry.

    ``symmetric=True`` is the caller's word that ``A = Aᵀ``; ``cols`` then default to ``rows``.

    >>> import torch
    >>> Dense(torch.eye(3), rows=Axes(example=3), symmetric=True)
    Dense(rows=Axes(example=3), cols=Axes(example=3), float32, cpu, symmetric)
    """

    def __init__(
        self,
        matrix: Float[Tensor, "rows cols"],
        rows: Axes | None = None,
        cols: Axes | None = None,
        *,
        symmetric: bool = False,
    ) -> None:
        require_matrix(matrix, "matrix")
        rows = require_size(rows, matrix.shape[0], "rows", "matrix")
        cols = require_size(rows if cols is None and symmetric else cols, matrix.shape[1], "cols", "matrix")
        super().__init__(rows, cols, dtype=matrix.dtype, device=matrix.device, symmetric=symmetric)
        self.matrix = matrix

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return contract("row col, col k -> row k", self.matrix, x)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return contract("row col, row k -> col k", self.matrix, x)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        # A copy: a caller who adds a ridge to dense() in place must not change the operator.
        return self.matrix.clone()


class Identity(LinearOperator):
    """The identity ``I``.

    >>> Identity(2, dtype=torch.float64).dense().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, axes: Axes | int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(axes, axes, dtype=dtype, device=device, symmetric=True)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return x.clone()

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return torch.eye(self.rows.size, dtype=self.dtype, device=self.device)


class Diagonal(LinearOperator):
    """``diag(d)``.

    >>> (Diagonal(torch.tensor([2.0, 3.0])) @ torch.tensor([1.0, 10.0])).tolist()
    [2.0, 30.0]
    """

    def __init__(self, diagonal: Float[Tensor, " rows"], axes: Axes | None = None) -> None:
        if diagonal.ndim != 1:
            raise InputError(
                f"diagonal must have shape (n,), got {tuple(diagonal.shape)}. "
                "For a whole matrix use Dense(matrix), or pass matrix.diagonal()."
            )
        axes = require_size(axes, diagonal.shape[0], "axes", "diagonal")
        super().__init__(axes, axes, dtype=diagonal.dtype, device=diagonal.device, symmetric=True)
        self.diagonal = diagonal

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self.diagonal[:, None] * x

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return torch.diag_embed(self.diagonal)


class LowRank(LinearOperator):
    """``U diag(s) Vᵀ`` from thin factors; without ``right`` the symmetric ``U diag(s) Uᵀ``.

    ``left`` is (rows, rank), ``right`` (cols, rank), ``weights`` (rank,) and one where left out.

    >>> features = torch.tensor([[1.0], [2.0]])
    >>> LowRank(features).dense().tolist(), LowRank(features).symmetric
    ([[1.0, 2.0], [2.0, 4.0]], True)
    """

    def __init__(
        self,
        left: Float[Tensor, "rows rank"],
        right: Float[Tensor, "cols rank"] | None = None,
        weights: Float[Tensor, " rank"] | None = None,
        *,
        rows: Axes | None = None,
        cols: Axes | None = None,
    ) -> None:
        require_matrix(left, "left")
        symmetric = right is None
        right = left if right is None else right
        weights = left.new_ones(left.shape[1:]) if weights is None else weights
        _require_factors(left, right, weights)
        rows = require_size(rows, left.shape[0], "rows", "left")
        cols = require_size(rows if cols is None and symmetric else cols, right.shape[0], "cols", "right")
        super().__init__(rows, cols, dtype=left.dtype, device=left.device, symmetric=symmetric)
        self.left, self.right, self.weights = left, right, weights

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        coefficients = self.weights[:, None] * contract("col rank, col k -> rank k", self.right, x)
        return contract("row rank, rank k -> row k", self.left, coefficients)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        coefficients = self.weights[:, None] * contract("row rank, row k -> rank k", self.left, x)
        return contract("col rank, rank k -> col k", self.right, coefficients)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return contract("row rank, rank, col rank -> row col", self.left, self.weights, self.right)


class Function(LinearOperator):
    """An operator given by two callables, ``X ↦ A X`` and ``Y ↦ Aᵀ Y``.

    Each takes and returns a matrix of column vectors, and what it returns is checked. The second may be
    left out where ``symmetric=True`` declares it equal to the first.

    >>> shift = Function(lambda x: x.roll(1, 0), lambda y: y.roll(-1, 0), 3, 3, dtype=torch.float64)
    >>> shift.dense().tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """

    def __init__(
        self,
        matmat: Callable[[Tensor], Tensor],
        adjoint_matmat: Callable[[Tensor], Tensor] | None,
        rows: Axes | int,
        cols: Axes | int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        symmetric: bool = False,
    ) -> None:
        super().__init__(rows, cols, dtype=dtype, device=device, symmetric=symmetric)
        if adjoint_matmat is None and not symmetric:
            raise InputError(
                "a Function needs a callable for its transposed product, got None. "
                "Pass adjoint_matmat, or symmetric=True if the operator is its own transpose."
            )
        self._forward = matmat
        self._backward = matmat if adjoint_matmat is None else adjoint_matmat

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self._checked("matmat", self._forward(x), (self.rows.size, x.shape[1]))

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return self._checked("adjoint_matmat", self._backward(x), (self.cols.size, x.shape[1]))

    def _checked(self, name: str, y: Tensor, shape: tuple[int, int]) -> Tensor:
        if tuple(y.shape) != shape or y.dtype != self.dtype or y.device != self.device:
            raise InputError(
                f"the callable {name} must return shape {shape}, {self.dtype} on {self.device}, got shape "
                f"{tuple(y.shape)}, {y.dtype} on {y.device}. Each column it is handed is one vector."
            )
        return y


def as_operator(matrix: Tensor | LinearOperator) -> LinearOperator:
    """The operator itself, or a matrix as :class:`Dense`.

    >>> as_operator(torch.eye(2)) @ torch.tensor([1.0, 2.0])
    tensor([1., 2.])
    """
    return matrix if isinstance(matrix, LinearOperator) else Dense(matrix)


def require_matrix(x: Tensor, name: str) -> None:
    """Raise unless ``x`` has two axes."""
    if x.ndim != 2:
        raise InputError(
            f"{name} must be a matrix of shape (rows, cols), got shape {tuple(x.shape)}. "
            "Reshape it; a single column is x[:, None]."
        )


def require_size(axes: Axes | None, size: int, name: str, source: str) -> Axes:
    """``axes`` if they have ``size`` entries, anonymous ones where none were given."""
    if axes is None:
        return Axes.anonymous(size)
    if axes.size != size:
        raise InputError(
            f"{name} must have size {size} to match {source}, got {axes!r} of size {axes.size}. "
            "Correct the sizes, or leave the axes out."
        )
    return axes


def _require_factors(left: Tensor, right: Tensor, weights: Tensor) -> None:
    rank = left.shape[1]
    if right.ndim != 2 or right.shape[1] != rank or tuple(weights.shape) != (rank,):
        raise InputError(
            f"left (rows, rank), right (cols, rank) and weights (rank,) must share the rank, got shapes "
            f"{tuple(left.shape)}, {tuple(right.shape)} and {tuple(weights.shape)}. Transpose a factor?"
        )
    require_same_kind("left, right and weights", left, right, weights)
