"""``open_kernel``: a kernel on disk, read tile by tile; eigenvalues, alignment and regression without gathering it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_count, check_number
from gramscope.base.errors import InputError
from gramscope.base.memory_budget import Memory, free_memory, memory_budget
from gramscope.base.results import Result
from gramscope.kernels.kernel_matrix import target_matrix
from gramscope.linalg import Identity, RitzPairs, Solution, conjugate_gradient, eigenvalues_top
from gramscope.measures.kernel_alignment import Alignment, AlignmentState
from gramscope.scale.manifest import read_manifest
from gramscope.scale.nystrom import NystromPreconditioner
from gramscope.scale.tile_folder import TileFolder
from gramscope.scale.tile_operator import STRIP_ENTRIES, TileOperator
from gramscope.scale.tile_plan import Tile, TileValues
from gramscope.store.store_errors import StoreError

if TYPE_CHECKING:
    import xarray as xr


def open_kernel(folder: str | os.PathLike[str]) -> "TiledKernel":
    """The kernel that ``gs.ntk(..., out=folder)`` wrote, or is still writing; nothing is read but its manifest.

    >>> import tempfile, torch, gramscope as gs
    >>> folder = tempfile.mkdtemp()
    >>> written = gs.ntk(torch.nn.Linear(3, 2, bias=False), torch.eye(3), reduce="trace", out=folder)
    >>> gs.open_kernel(folder)
    TiledKernel 3 x 3, float32, 1 of 1 tiles
    >>> gs.open_kernel(folder).to_tensor().diagonal()
    tensor([2., 2., 2.])
    """
    return TiledKernel(Path(folder))


class TiledKernel:
    """A kernel on disk: (n, m), or (n, C, m, C) where the outputs are not traced.

    Each tile is checked against its checksum when it is first read. A tile that is not there yet is an error here; for
    other readers of zarr it is NaN.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.plan = self.manifest.plan
        self._files = TileFolder(folder, self.plan)
        self._checked: set[Tile] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.plan.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.plan.dtype == "float64" else torch.float32

    @property
    def missing(self) -> list[Tile]:
        """Tiles that are still to be computed."""
        return self._files.missing()

    @property
    def complete(self) -> bool:
        return not self.missing

    def verify(self) -> list[Tile]:
        """Reads all finished tiles; those whose bytes are not the ones that were recorded."""
        return self._files.damaged(self._files.finished())

    def tile(self, i: int, j: int) -> TileValues:
        """The entries of tile (i, j), those below the diagonal of a symmetric kernel too."""
        high, wide = self.plan.grid
        if not (0 <= i < high and 0 <= j < wide):
            raise InputError(f"a tile must be one of {high} x {wide}, counted from 0, got ({i}, {j}).")
        mirror = self.plan.symmetric and i > j
        record = self._files.record((j, i) if mirror else (i, j))
        if record is None:
            raise StoreError(
                f"tile ({i}, {j}) of {self.folder} must be there, but it is not computed yet ({len(self.missing)} of "
                f"{len(self.plan.tiles)} are missing). Run the same gs.ntk(..., out=...) again, or wait for it."
            )
        digest = record.mirror_sha256 if mirror else record.sha256
        values = self._files.read((i, j), None if (i, j) in self._checked else digest)
        self._checked.add((i, j))
        return values

    @property
    def array(self) -> "xr.DataArray":
        """The kernel as a lazy xarray with named axes: a tile is read when an entry of it is asked for."""
        from gramscope.scale.lazy_tiles import lazy_array

        return lazy_array(self.plan, lambda tile: self.tile(*tile), {"folder": str(self.folder)})

    def to_tensor(self, device: torch.device | str = "cpu", memory: Memory = None) -> Tensor:
        """The whole kernel in memory, if it fits into ``memory`` bytes (what is free if None)."""
        place = torch.device(device)
        size = int(np.prod(self.shape)) * self.plan.itemsize
        room = free_memory(place) if memory is None else memory_budget(memory, place)
        if size > room:
            raise InputError(
                f"the kernel must fit into memory, but it has {size:,} bytes and {room:,} are allowed. Take parts of "
                "kernel.array, or use its methods, which read tile by tile."
            )
        whole = torch.empty(self.shape, dtype=self.dtype, device=place)
        high, wide = self.plan.grid
        for i, j in product(range(high), range(wide)):
            rows, cols = self.plan.range(i, 0), self.plan.range(j, 1)
            part = whole[rows, cols] if whole.dim() == 2 else whole[rows, :, cols]
            part.copy_(torch.from_numpy(self.tile(i, j)))
        return whole

    def operator(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> TileOperator:
        """The kernel as a linear operator; one product reads each tile once."""
        return TileOperator(self.plan, lambda tile: self.tile(*tile), dtype=dtype, device=device)

    def trace(self) -> float:
        self._require_symmetric("a trace")
        return float(self.operator().diagonal().sum())

    def eigenvalues_top(self, k: int, **options: Any) -> RitzPairs:
        """The ``k`` largest eigenvalues with their vectors, by Krylov iteration over the tiles.

        ``options`` are those of :func:`gramscope.linalg.eigenvalues_top`; a block of products reads each tile once.
        """
        self._require_symmetric("eigenvalues")
        return eigenvalues_top(self.operator(), k, **options)

    def alignment(self, other: "TiledKernel | Tensor") -> float:
        """``⟨K, L⟩ / (|K| |L|)`` with another kernel of the same shape, tile by tile."""
        if tuple(other.shape) != self.shape:
            raise InputError(f"the other kernel must have shape {self.shape}, got {tuple(other.shape)}.")
        measure, state = Alignment(), AlignmentState()
        for tile, mine in self._computed():
            rows, cols = self.plan.range(tile[0], 0), self.plan.range(tile[1], 1)
            places = (rows, cols) if len(self.shape) == 2 else (rows, slice(None), cols, slice(None))
            part = other[places] if isinstance(other, Tensor) else torch.from_numpy(other.array[places].to_numpy())
            size = max(1, STRIP_ENTRIES // mine[0].numel())
            for strips in zip(mine.flatten(1).split(size), part.cpu().flatten(1).split(size), strict=True):
                found = measure.update(*strips)
                for _ in range(1 + self.plan.mirrored(tile)):
                    state = measure.merge(state, found)
        return measure.compute(state)

    def target_alignment(self, targets: Tensor) -> float:
        """``⟨K, y yᵀ⟩ / (|K| |y yᵀ|)``, the targets centred over the examples; labels (n,) count as one-hot.

        The same number as :meth:`gramscope.Kernel.target_alignment`.
        """
        self._require_symmetric("a target alignment")
        y = target_matrix(targets.detach().cpu(), self.plan.rows)
        y = y - y.mean(0)
        if len(self.shape) == 4:
            if y.shape[1] != self.plan.outputs:
                raise InputError(
                    f"targets must have {self.plan.outputs} columns, one for each output, got {y.shape[1]}."
                )
            y = y.reshape(-1, 1)
        op, inner, square = self.operator(), 0.0, 0.0
        for rows, cols, mirrored, part in op.strips():
            inner += (1 + mirrored) * float((part * (y[rows] @ y[cols].mT)).sum())
            square += (1 + mirrored) * float(part.square().sum())
        size = square**0.5 * float(torch.linalg.matrix_norm(y.mT @ y))
        return inner / size if size > 0 else float("nan")

    def regress(
        self, y: Float[Tensor, "n k"], ridge: float, *, rank: int = 200, tol: float = 1e-8, max_iter: int = 1000,
        seed: int = 0,
    ) -> "TiledRegression":  # fmt: skip
        """Kernel regression: solves ``(K + ridge·1) a = y`` by conjugate gradients over the tiles.

        A Nyström preconditioner of rank ``rank`` (0 for none), from one pass over the tiles, takes the largest
        eigenvalues away. Each step of all columns of y reads each tile once.
        """
        self._require_symmetric("regression")
        check_number(ridge, "ridge", above=0.0, hint="Without one this may not be solvable.")
        check_count(rank, "rank", least=0)
        targets = target_matrix(y.detach().cpu(), self.plan.rows)
        columns = targets if len(self.shape) == 2 else targets.reshape(-1, 1)
        op = self.operator()
        if len(columns) != op.shape[0]:
            raise InputError(f"y must have {self.plan.outputs} columns, one for each output, got {targets.shape[1]}.")
        shifted = op + Identity(op.rows, dtype=op.dtype) * ridge
        preconditioner = NystromPreconditioner.of(op, rank, ridge, seed) if rank else None
        found = conjugate_gradient(shifted, columns, preconditioner=preconditioner, tol=tol, max_iter=max_iter)
        return TiledRegression(found.x, found, targets.shape[1])

    def _computed(self) -> Iterator[tuple[Tile, Tensor]]:
        return ((tile, torch.from_numpy(self.tile(*tile))) for tile in self.plan.tiles)

    def _require_symmetric(self, what: str) -> None:
        if not self.plan.symmetric:
            raise InputError(f"{what} needs a kernel of examples with themselves, but this one was made with x2.")

    def __repr__(self) -> str:
        size, total = " x ".join(map(str, self.shape)), len(self.plan.tiles)
        return f"TiledKernel {size}, {self.plan.dtype}, {total - len(self.missing)} of {total} tiles"


@dataclass(frozen=True, eq=False, repr=False)
class TiledRegression(Result):
    """``a = (K + ridge·1)⁻¹ y``, and what the solver says of it (residuals, iterations, converged or not)."""

    weights: Float[Tensor, "rows k"]
    solution: Solution
    outputs: int

    def predict(self, cross: TiledKernel | Tensor) -> Float[Tensor, "m k"]:
        """``K_* a`` for new examples: ``cross`` has them in its rows and the training examples in its columns."""
        if isinstance(cross, TiledKernel):
            product = cross.operator().matmat(self.weights)
        else:
            matrix = cross.flatten(2).flatten(0, 1) if cross.dim() == 4 else cross
            product = matrix.double().cpu() @ self.weights
        return product.reshape(-1, self.outputs)
