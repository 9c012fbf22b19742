"""A kernel on disk as a linear operator: products tile by tile, never the whole matrix in memory."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.linalg.operator import LinearOperator
from gramscope.scale.tile_plan import Tile, TilePlan, TileValues

# Of a tile that are multiplied at a time: 8 MB in float64.
STRIP_ENTRIES = 2**20


class TileOperator(LinearOperator):
    """``K`` of a :class:`TiledKernel`: one product reads each tile once, or of a symmetric kernel the upper ones.

    The next tile is read while one is multiplied. ``dtype`` and ``device`` are those of the vectors, and of the
    products: float64 by default, so that solvers lose nothing beyond what the tiles themselves hold.
    """

    def __init__(
        self, plan: TilePlan, read: Callable[[Tile], TileValues], *, dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.plan, self.read = plan, read
        self.width = 1 if plan.reduce == "trace" else plan.outputs
        rows, cols = (Axes.anonymous(count * self.width) for count in (plan.rows, plan.cols))
        super().__init__(rows, rows if plan.symmetric else cols, dtype=dtype, device=device, symmetric=plan.symmetric)

    def strips(self) -> Iterator[tuple[slice, slice, bool, Float[Tensor, "rows cols"]]]:
        """The computed tiles, some rows at a time: which rows and columns, written twice or not, and the entries.

        One tile is read ahead. A strip alone has the dtype of the products, so that a tile takes no more memory than
        it did when it was computed.
        """
        places = self.plan.tiles
        with ThreadPoolExecutor(1, "gramscope tiles") as pool:
            ahead = pool.submit(self.read, places[0])
            for at, (i, j) in enumerate(places):
                values = torch.from_numpy(ahead.result())
                if at + 1 < len(places):
                    ahead = pool.submit(self.read, places[at + 1])
                matrix = values.flatten(2).flatten(0, 1) if values.dim() == 4 else values
                start, cols = self.plan.range(i, 0).start * self.width, self.entries(j, 1)
                for part in matrix.split(max(1, STRIP_ENTRIES // matrix.shape[1])):
                    rows = slice(start, start + len(part))
                    yield rows, cols, self.plan.mirrored((i, j)), part.to(self.device, self.dtype)
                    start = rows.stop

    def diagonal(self) -> Float[Tensor, " rows"]:
        """The diagonal of a symmetric kernel."""
        tiles = (torch.from_numpy(self.read((i, i))) for i in range(self.plan.grid[0]))
        found = [(tile.flatten(2).flatten(0, 1) if tile.dim() == 4 else tile).diagonal().clone() for tile in tiles]
        return torch.cat(found).to(self.device, self.dtype)

    def entries(self, place: int, side: int) -> slice:
        """The rows (side 0) or columns (side 1) of the tiles number ``place``."""
        part = self.plan.range(place, side)
        return slice(part.start * self.width, part.stop * self.width)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        out = x.new_zeros(self.shape[0], x.shape[1])
        for rows, cols, mirrored, part in self.strips():
            out[rows] += part @ x[cols]
            if mirrored:
                out[cols] += part.mT @ x[rows]
        return out

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        if self.symmetric:
            return self._matmat(x)
        out = x.new_zeros(self.shape[1], x.shape[1])
        for rows, cols, _, part in self.strips():
            out[cols] += part.mT @ x[rows]
        return out
