"""A kernel on disk as a lazy xarray: a tile is read when an entry of it is asked for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from gramscope.scale.tile_plan import Tile, TilePlan, TileValues


class _TileArray(BackendArray):
    """What xarray asks for entries."""

    def __init__(self, plan: TilePlan, read: Callable[[Tile], TileValues]) -> None:
        self.plan, self.read = plan, read
        self.shape, self.dtype = plan.shape, np.dtype(plan.dtype)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._get)

    def _get(self, key: tuple[Any, ...]) -> TileValues:
        """Entries by one index for each axis: a number, a slice or an array of numbers."""
        chosen = [np.arange(length)[index] for index, length in zip(key, self.shape, strict=True)]
        lists = [np.atleast_1d(index) for index in chosen]
        found = np.empty([len(index) for index in lists], dtype=self.dtype)
        first, second = (0, 1) if self.plan.reduce == "trace" else (0, 2)
        places = [lists[axis] // size for axis, size in ((first, self.plan.tile[0]), (second, self.plan.tile[1]))]
        for i in np.unique(places[0]):
            for j in np.unique(places[1]):
                inside: list[Any] = list(lists)
                here: list[Any] = [np.arange(len(index)) for index in lists]
                for axis, side, place in ((first, 0, i), (second, 1, j)):
                    here[axis] = np.flatnonzero(places[side] == place)
                    inside[axis] = lists[axis][here[axis]] - place * self.plan.tile[side]
                found[np.ix_(*here)] = self.read((int(i), int(j)))[np.ix_(*inside)]
        return found.reshape([len(index) for index in chosen if index.ndim])


def lazy_array(plan: TilePlan, read: Callable[[Tile], TileValues], attrs: dict[str, Any]) -> xr.DataArray:
    """The kernel with named axes; ``read`` gives the entries of a tile."""
    variable = xr.Variable(plan.dims, indexing.LazilyIndexedArray(_TileArray(plan, read)))
    return xr.DataArray(variable, name="kernel", attrs=attrs)
