"""The tile plan: how a kernel that is written to disk is cut, which tiles are computed, what each process may use."""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.kernels.contractions import even_size

Tile = tuple[int, int]
TileValues: TypeAlias = NDArray[np.floating[Any]]  # float32 or float64, as the plan says
# Bytes of one tile at most: a file that any file system takes, and the work that is lost if a process is killed.
LARGEST_TILE = 2**28
# The part of a process's memory that one tile may take: it is held, turned over for its mirror image, and written.
TILE_SHARE = 8
# Tiles on a side, at least, for kernels of so many examples: progress is seen, and a killed job loses little. With
# fewer examples the passes through the network, which each tile makes again, would cost more than the pairs.
FEWEST_TILES, MANY_EXAMPLES = 4, 8192
# Tiles for each process, at least, so that none waits long for the last one; but not tiles smaller than this.
TILES_PER_PROCESS, SMALLEST_TILE = 2, 64


@dataclass(frozen=True)
class TilePlan:
    """How the kernel of ``rows`` x ``cols`` examples is cut into tiles.

    ``tile`` holds the examples of one tile on either side; the last tiles of a side may have fewer. A symmetric kernel
    is computed at and above its diagonal, and each tile is written a second time, turned over, below it. ``memory``
    bytes are what one process may use; the same number gives the same blocks inside a tile, and so the same bits.

    >>> plan = TilePlan(10, 10, 1, reduce="trace", symmetric=True, tile=(4, 4), dtype="float32", memory=10**9)
    >>> plan.grid, len(plan.tiles), plan.shape, plan.chunks
    ((3, 3), 6, (10, 10), (4, 4))
    """

    rows: int
    cols: int
    outputs: int
    reduce: Literal["none", "trace"]
    symmetric: bool
    tile: tuple[int, int]
    dtype: str
    memory: int

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles in a column and in a row of the kernel."""
        return math.ceil(self.rows / self.tile[0]), math.ceil(self.cols / self.tile[1])

    @property
    def tiles(self) -> list[Tile]:
        """The tiles that are computed; the others of a symmetric kernel are their mirror images."""
        high, wide = self.grid
        return [(i, j) for i in range(high) for j in range(i if self.symmetric else 0, wide)]

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, m), or (n, C, m, C) where the outputs are not traced."""
        return self._with_outputs(self.rows, self.cols)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of one tile in its file."""
        return self._with_outputs(*self.tile)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        return ("row", "col") if self.reduce == "trace" else ("row", "row_output", "col", "col_output")

    @property
    def itemsize(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def bytes(self) -> int:
        """On disk, when it is complete: whole tiles, at the edges too."""
        high, wide = self.grid
        return high * wide * self.tile_bytes

    @property
    def tile_bytes(self) -> int:
        return math.prod(self.chunks) * self.itemsize

    @property
    def compute_memory(self) -> int:
        """Bytes for the computation of a tile, beside the copies of it that wait to be written."""
        return max(1, self.memory - 3 * self.tile_bytes)

    @property
    def pairs(self) -> int:
        """Pairs of examples whose kernel is computed."""
        return sum(self.examples(i, 0) * self.examples(j, 1) for i, j in self.tiles)

    @property
    def passes(self) -> int:
        """Examples that go forward and backward through the network, counted as often as they do."""
        alone = self.symmetric
        return sum(self.examples(i, 0) + (0 if alone and i == j else self.examples(j, 1)) for i, j in self.tiles)

    def examples(self, place: int, side: int) -> int:
        """Examples of the tiles number ``place`` on a side: 0 for rows, 1 for columns."""
        part = self.range(place, side)
        return part.stop - part.start

    def range(self, place: int, side: int) -> slice:
        """Which examples these are."""
        start = place * self.tile[side]
        return slice(start, min(start + self.tile[side], (self.rows, self.cols)[side]))

    def valid(self, tile: Tile) -> tuple[slice, ...]:
        """The part of a tile's file that holds the kernel; the rest, at the edges, is NaN."""
        high, wide = (slice(0, self.examples(place, side)) for side, place in enumerate(tile))
        return (high, wide) if self.reduce == "trace" else (high, slice(None), wide, slice(None))

    def mirrored(self, tile: Tile) -> bool:
        """Is this tile written twice?"""
        return self.symmetric and tile[0] != tile[1]

    @classmethod
    def from_json(cls, fields: JSONObject) -> "TilePlan":
        return cls(**{**fields, "tile": (int(fields["tile"][0]), int(fields["tile"][1]))})

    def __str__(self) -> str:
        size = " x ".join(f"{length:,}" for length in self.shape)
        twice = ", those below the diagonal as mirror images" if self.symmetric and len(self.tiles) > 1 else ""
        again = self.passes / (self.rows if self.symmetric else self.rows + self.cols)
        tiles = "1 tile" if len(self.tiles) == 1 else f"{len(self.tiles)} tiles"
        passes = f"{again:.1f} times: activations are computed again for each tile" if again > 1 else "once"
        return (
            f"Kernel {size}, {self.dtype}, {size_in_words(self.bytes)} on disk.\n"
            f"{tiles} of {self.tile[0]:,} x {self.tile[1]:,} examples to compute, "
            f"{math.prod(self.grid)} to write{twice}.\n"
            f"{size_in_words(self.memory)} of memory for each process.\n"
            f"Each example goes through the network {passes}."
        )

    def _with_outputs(self, rows: int, cols: int) -> tuple[int, ...]:
        return (rows, cols) if self.reduce == "trace" else (rows, self.outputs, cols, self.outputs)


def choose_tile(
    rows: int, cols: int, *, outputs: int, itemsize: int, memory: int, processes: int = 1, symmetric: bool = True
) -> tuple[int, int]:
    """Examples of a tile on either side: as many as fit, but enough tiles to share and to resume.

    ``outputs`` are those of each example that stay open (1 for a trace).

    >>> choose_tile(60_000, 60_000, outputs=1, itemsize=4, memory=64 * 10**9)
    (7500, 7500)
    """
    entry = outputs * outputs * itemsize
    room = min(LARGEST_TILE, memory // TILE_SHARE) // entry
    if room < 1:
        raise InputError(
            f"memory must be at least {TILE_SHARE * entry:,} bytes, for tiles of one example and {outputs} outputs, "
            f'got {memory:,}. Give more, choose fewer outputs, or use reduce="trace".'
        )
    side = max(1, math.isqrt(room))
    # Of a long and narrow kernel one side may fit whole; then the other may be longer.
    high = min(rows, max(side, room // max(1, min(side, cols))))
    wide = min(cols, max(1, room // high))
    if symmetric:
        high = wide = min(rows, side)
    most = max(rows, cols)
    least = FEWEST_TILES if most >= MANY_EXAMPLES else 1
    if processes > 1:
        wanted = TILES_PER_PROCESS * processes  # g (g + 1) / 2 tiles of a symmetric kernel, g² of another
        least = max(least, math.ceil(math.sqrt((2 if symmetric else 1) * wanted)))
    high, wide = (
        max(min(SMALLEST_TILE, fits), min(fits, math.ceil(n / least))) for n, fits in ((rows, high), (cols, wide))
    )
    return even_size(rows, high), even_size(cols, wide)


def size_in_words(count: int) -> str:
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count} bytes"
