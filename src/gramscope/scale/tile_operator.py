"""A kernel on disk as a linear operator: products tile by tile, never the whole matrix in memory."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.linalg.operator import LinearOperator
from gramscope.scale.tile_plan import Tile, TilePlan, TileValues


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

    def tiles(self) -> Iterator[tuple[Tile, Float[Tensor, "rows cols"]]]:
        """The computed tiles as matrices; one is read ahead."""
        places = self.plan.tiles
        with ThreadPoolExecutor(1, "gramscope tiles") as pool:
            ahead = pool.submit(self.read, places[0])
            for at, place in enumerate(places):
                values = ahead.result()
                if at + 1 < len(places):
                    ahead = pool.submit(self.read, places[at + 1])
                yield place, self._matrix(values)

    def _matrix(self, values: TileValues) -> Float[Tensor, "rows cols"]:
        matrix = torch.from_numpy(values).to(self.device, self.dtype)
        return matrix.flatten(2).flatten(0, 1) if matrix.dim() == 4 else matrix

    def diagonal(self) -> Float[Tensor, " rows"]:
        """The diagonal of a symmetric kernel."""
        found = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
        for i in range(self.plan.grid[0]):
            found[self.entries(i, 0)] = self._matrix(self.read((i, i))).diagonal()
        return found

    def entries(self, place: int, side: int) -> slice:
        """The rows (side 0) or columns (side 1) of the tiles number ``place``."""
        part = self.plan.range(place, side)
        return slice(part.start * self.width, part.stop * self.width)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        out = x.new_zeros(self.shape[0], x.shape[1])
        for (i, j), matrix in self.tiles():
            rows, cols = self.entries(i, 0), self.entries(j, 1)
            out[rows] += matrix @ x[cols]
            if self.plan.mirrored((i, j)):
                out[cols] += matrix.mT @ x[rows]
        return out

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        if self.symmetric:
            return self._matmat(x)
        out = x.new_zeros(self.shape[1], x.shape[1])
        for (i, j), matrix in self.tiles():
            out[self.entries(j, 1)] += matrix.mT @ x[self.entries(i, 0)]
        return out
