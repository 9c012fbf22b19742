"""Adding the pieces of sites to a kernel, in rectangles that suit the machine."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gramscope.capture import Site
from gramscope.kernels.assemble import Assembly
from gramscope.kernels.pieces import (
    ConstantSignalPiece,
    HadamardPiece,
    HadamardTracePiece,
    HalfPiece,
    Piece,
    Range,
    RowPiece,
    TiedPiece,
    joined,
    rectangles,
    strips,
)  # fmt: skip

Sites = Mapping[str, tuple[Site, ...]]
# Fewest and most rows of the kernel matrix computed in one go, and how fine strips are cut on the diagonal: fewest rows
# and parts of a strip. Tall strips amortise reading the other side, small ones waste less of a symmetric kernel's other
# half; a GPU wants few and large products.
STRIP_ROWS = {"cpu": (320, 1280, 40, 8), "cuda": (640, 2560, 640, 1)}
STRIP_EXAMPLES = 16  # for pieces that loop over examples
# Entries of one tile of S Sᵀ: on the CPU it should still be in the cache when it meets Q.
TILE = {"cpu": 2**19, "cuda": 2**40}
# Rows that are mirrored at once.
MIRRORED = {"cpu": 96, "cuda": 128}
# Pieces that are light work for each entry wait for others, to go through the kernel together; so many at most.
LIGHT = (HadamardPiece, HadamardTracePiece, ConstantSignalPiece)
WAITING = 16
WHOLE = (HalfPiece, TiedPiece)  # strips that are not cut again on the diagonal


class Accumulator:
    """Adds the kernels of sites to ``targets``: one for each parameter, or one under "" for all if ``fuse``.

    Targets are (n, m) for a trace, (n, c, m, d) otherwise; of a symmetric one only the upper half is added. ``split``
    takes products of rows on the tensor cores.
    """

    def __init__(
        self, targets: Mapping[str, Tensor], trace: bool, chunk: int, symmetric: bool, fuse: bool, split: bool = False
    ) -> None:  # fmt: skip
        self.targets, self.symmetric, self.fuse = targets, symmetric, fuse
        some = next(iter(targets.values()))
        self.n, self.m = (some.shape[0], some.shape[1]) if trace else (some.shape[0], some.shape[2])
        self.assembly = Assembly(trace, some.dtype, chunk, split and some.dtype == torch.float32)
        self.matrices = {name: _matrix(target) for name, target in targets.items()}
        self.light: list[Piece] = []
        self.narrow: list[RowPiece] = []

    def add(self, left: Sites, right: Sites) -> None:
        """Add the kernels of some parameters; ``right`` is ``left`` itself where the kernel is symmetric."""
        for name, piece, narrow in self.assembly.pieces(left, right, self.fuse):
            if narrow and isinstance(piece, RowPiece):
                self.narrow.append(piece)
            elif self.fuse and isinstance(piece, LIGHT):
                self.light.append(piece)
            else:
                self._add_strips([piece], self.matrices["" if self.fuse else name])
        if len(self.light) + len(self.narrow) >= WAITING:
            self._flush()

    def finish(self) -> None:
        """Add what waits, and put tiles that were copies in their places."""
        self._flush()
        for name, target in self.targets.items():
            matrix = self.matrices[name]
            if matrix.data_ptr() != target.data_ptr():
                target.add_(matrix.view(target.shape))

    def _flush(self) -> None:
        if self.light:
            self._add_strips(self.light, self.matrices[""])
        if self.narrow:
            self._add_strips([joined(self.narrow)], self.matrices[""])
        self.light, self.narrow = [], []

    def _add_strips(self, pieces: Sequence[Piece], target: Tensor) -> None:
        """All pieces in turn on each rectangle, while it is in the cache."""
        n, m = self.n, self.m
        c, d = len(target) // n, target.shape[1] // m
        size = _strip(pieces[0], target, n)
        leaf, finer = STRIP_ROWS.get(target.device.type, STRIP_ROWS["cuda"])[2:]
        finest = size if isinstance(pieces[0], WHOLE) else min(size, max(1, leaf // c, size // finer))
        for rows, all_cols in rectangles(n, m, size, finest, self.symmetric):
            for cols in _tiles(pieces, rows, all_cols, c * d, target.device.type):
                for piece in pieces:
                    piece.add(target[rows[0] * c : rows[1] * c, cols[0] * d : cols[1] * d], rows, cols)


def _matrix(target: Tensor) -> Tensor:
    """A target as a matrix: a view where memory allows, zeros of its size otherwise."""
    if target.dim() == 2:
        return target
    n, c, m, d = target.shape
    try:
        return target.view(n * c, m * d)
    except RuntimeError:
        return target.new_zeros(n * c, m * d)


def _tiles(pieces: Sequence[Piece], rows: Range, cols: Range, width: int, device: str) -> Iterator[Range]:
    """Columns of a rectangle in parts that stay in the cache, where its pieces are light work for each entry."""
    if not isinstance(pieces[0], LIGHT):
        yield cols
        return
    few = max(1, TILE.get(device, TILE["cuda"]) // ((rows[1] - rows[0]) * width))
    for start, stop in strips(cols[1] - cols[0], few):
        yield cols[0] + start, cols[0] + stop


def _strip(piece: Piece, target: Tensor, n: int) -> int:
    """Examples in one strip of rows."""
    if isinstance(piece, HalfPiece):
        return piece.strip
    if isinstance(piece, TiedPiece):
        return STRIP_EXAMPLES
    smallest, largest, *_ = STRIP_ROWS.get(target.device.type, STRIP_ROWS["cuda"])
    if isinstance(piece, RowPiece) and piece.split:
        smallest = largest  # tensor cores want large products
    rows = min(largest, max(smallest, len(target) // 8 if target.is_cuda else len(target) // 4))
    return max(1, rows * n // len(target))


def mirror(matrix: Tensor) -> None:
    """Copy the upper triangle of a symmetric matrix onto the lower one."""
    size = MIRRORED.get(matrix.device.type, MIRRORED["cuda"])
    lower = torch.ones(size, size, dtype=torch.bool, device=matrix.device).tril(-1)
    for start, stop in strips(len(matrix), size):
        corner = matrix[start:stop, start:stop]
        corner.copy_(torch.where(lower[: stop - start, : stop - start], corner.T, corner))
        rows = matrix[start:stop, stop:]
        # On the CPU through a copy that stays in the cache: read along the rows, then turned.
        matrix[stop:, start:stop] = rows.T if rows.is_cuda else rows.contiguous().T
