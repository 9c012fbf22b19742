"""Operators laid out as blocks of a larger one."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.linalg.algebra import are_adjoint, require_same_kind
from gramscope.linalg.elementary import Zero, as_operator, require_size
from gramscope.linalg.operator import LinearOperator

Cell = Tensor | LinearOperator | None


class Block(LinearOperator):
    """A grid of operators: ``(A x)_i = Σ_j A_ij x_j``. ``None`` stands for a zero block.

    Vectors are the blocks' vectors put end to end. It is symmetric if the blocks on the diagonal are and
    each other block sits opposite its own transpose.

    >>> import torch
    >>> row, corner = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    >>> Block([[row, corner], [None, corner]]).dense().tolist()
    [[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]]
    """

    def __init__(self, grid: Sequence[Sequence[Cell]], *, rows: Axes | None = None, cols: Axes | None = None) -> None:
        blocks = _filled(grid)
        row_axes = [line[0].rows for line in blocks]
        col_axes = [block.cols for block in blocks[0]]
        _require_grid_fits(blocks, row_axes, col_axes)
        self.grid = blocks
        first = blocks[0][0]
        joined_rows, joined_cols = _joined(row_axes, rows, "rows"), _joined(col_axes, cols, "cols")
        super().__init__(
            joined_rows,
            joined_cols,
            dtype=first.dtype,
            device=first.device,
            symmetric=_is_symmetric_grid(blocks) and joined_rows.matches(joined_cols),
        )

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return _apply_grid(self.grid, x)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        transposed = tuple(tuple(block.adjoint() for block in column) for column in zip(*self.grid, strict=True))
        return _apply_grid(transposed, x)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        lines = [torch.cat([cell.dense(block=block) for cell in line], dim=1) for line in self.grid]
        return torch.cat(lines, dim=0)


class BlockDiagonal(LinearOperator):
    """``A₁ ⊕ ... ⊕ A_m``: each operator on its own part of the vector, square or not.

    >>> import torch
    >>> BlockDiagonal(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).dense().tolist()
    [[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]
    """

    def __init__(self, *blocks: Tensor | LinearOperator, rows: Axes | None = None, cols: Axes | None = None) -> None:
        operators = tuple(as_operator(block) for block in blocks)
        require_same_kind(operators, "BlockDiagonal")
        joined_rows = _joined([block.rows for block in operators], rows, "rows")
        joined_cols = _joined([block.cols for block in operators], cols, "cols")
        super().__init__(
            joined_rows,
            joined_cols,
            dtype=operators[0].dtype,
            device=operators[0].device,
            symmetric=all(block.symmetric for block in operators) and joined_rows.matches(joined_cols),
        )
        self.blocks = operators

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        parts = torch.split_with_sizes(x, [block.cols.size for block in self.blocks])
        return torch.cat([block._matmat(part) for block, part in zip(self.blocks, parts, strict=True)])

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        parts = torch.split_with_sizes(x, [block.rows.size for block in self.blocks])
        return torch.cat([block._adjoint_matmat(part) for block, part in zip(self.blocks, parts, strict=True)])

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        matrix = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        row = col = 0
        for operator in self.blocks:
            rows, cols = operator.shape
            matrix[row : row + rows, col : col + cols] = operator.dense(block=block)
            row, col = row + rows, col + cols
        return matrix


Grid = tuple[tuple[LinearOperator, ...], ...]


def _filled(grid: Sequence[Sequence[Cell]]) -> Grid:
    """The grid with every ``None`` made a zero of the size its row and column have."""
    widths = {len(line) for line in grid}
    if len(widths) != 1 or 0 in widths:
        raise ValueError(
            f"every row of the grid must have the same number of blocks, at least one, got rows of "
            f"{[len(line) for line in grid]} blocks. Put None where a block is zero."
        )
    cells = [[None if cell is None else as_operator(cell) for cell in line] for line in grid]
    given = tuple(cell for line in cells for cell in line if cell is not None)
    require_same_kind(given, "Block")
    heights = [next((cell.rows for cell in line if cell is not None), None) for line in cells]
    breadths = [next((cell.cols for cell in column if cell is not None), None) for column in zip(*cells, strict=True)]

    def fill(cell: LinearOperator | None, rows: Axes | None, cols: Axes | None) -> LinearOperator:
        if cell is not None:
            return cell
        if rows is None or cols is None:
            raise ValueError(
                "each row and each column of the grid needs one block that is not None, to know its size. "
                "Put Zero(rows, cols, dtype=...) there."
            )
        return Zero(rows, cols, dtype=given[0].dtype, device=given[0].device)

    return tuple(
        tuple(fill(cell, height, breadth) for cell, breadth in zip(line, breadths, strict=True))
        for line, height in zip(cells, heights, strict=True)
    )


def _require_grid_fits(blocks: Grid, row_axes: list[Axes], col_axes: list[Axes]) -> None:
    for i, line in enumerate(blocks):
        for j, block in enumerate(line):
            if not (block.rows.matches(row_axes[i]) and block.cols.matches(col_axes[j])):
                raise ValueError(
                    f"block ({i}, {j}) must have rows {row_axes[i]!r} and cols {col_axes[j]!r} like its "
                    f"neighbours, got rows {block.rows!r} and cols {block.cols!r}. Transpose or rename it."
                )


def _is_symmetric_grid(blocks: Grid) -> bool:
    if len(blocks) != len(blocks[0]):
        return False
    pairs = [(blocks[i][j], blocks[j][i]) for i in range(len(blocks)) for j in range(i + 1)]
    return all(are_adjoint(a, b) or (isinstance(a, Zero) and isinstance(b, Zero)) for a, b in pairs)


def _joined(axes: list[Axes], named: Axes | None, name: str) -> Axes:
    if named is None:
        return reduce(add, axes)
    return require_size(named, sum(part.size for part in axes), name, "the blocks")


def _apply_grid(grid: Grid, x: Tensor) -> Tensor:
    parts = torch.split_with_sizes(x, [block.cols.size for block in grid[0]])
    lines = []
    for line in grid:
        products = (block._matmat(part) for block, part in zip(line, parts, strict=True))
        lines.append(reduce(add, products))
    return torch.cat(lines)
