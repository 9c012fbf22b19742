"""Kernels on disk in zarr's own layout (version 2): one plain file for each tile, which any reader of zarr opens.

    K/.zgroup, .zmetadata       the group, and all meta data once more, for readers that take it from one file
    K/kernel/.zarray, .zattrs   shape, tiles, dtype, names of the axes
    K/kernel/0.1                tile (0, 1): its entries, rows first, little-endian, not compressed

A tile that is not there reads as NaN. Specification: zarr-specs, storage format version 2 (2021).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from gramscope.base.json_values import JSONObject
from gramscope.scale.tile_plan import Tile, TilePlan, TileValues
from gramscope.store.files import Disk
from gramscope.store.store_errors import StoreError, disk_trouble

ARRAY = "kernel"


def metadata(plan: TilePlan) -> dict[str, JSONObject]:
    """The JSON files of the group, by path."""
    array = {
        "zarr_format": 2,
        "shape": list(plan.shape),
        "chunks": list(plan.chunks),
        "dtype": _dtype(plan).str,
        "compressor": None,
        "fill_value": "NaN",
        "order": "C",
        "filters": None,
    }
    files: dict[str, JSONObject] = {
        ".zgroup": {"zarr_format": 2},
        f"{ARRAY}/.zarray": array,
        f"{ARRAY}/.zattrs": {"_ARRAY_DIMENSIONS": list(plan.dims)},
    }
    return {**files, ".zmetadata": {"zarr_consolidated_format": 1, "metadata": dict(files)}}


def write_metadata(folder: Path, plan: TilePlan, disk: Disk, writer: str) -> None:
    """The files that make the folder a zarr group; they are the same from every process."""
    disk.make_directory(folder / ARRAY)
    for name, content in metadata(plan).items():
        disk.write_whole(folder / name, json.dumps(content, indent=1).encode(), writer)


def chunk_path(folder: Path, plan: TilePlan, tile: Tile) -> Path:
    i, j = tile
    return folder / ARRAY / (f"{i}.{j}" if plan.reduce == "trace" else f"{i}.0.{j}.0")


def encode(values: TileValues, plan: TilePlan, tile: Tile) -> memoryview:
    """The bytes of a tile's file: whole tiles, filled up with NaN at the edges of the kernel."""
    if values.shape != plan.chunks:
        whole = np.full(plan.chunks, np.nan, dtype=_dtype(plan))
        whole[plan.valid(tile)] = values
        values = whole
    return np.ascontiguousarray(values, dtype=_dtype(plan)).data.cast("B")


def read_chunk(folder: Path, plan: TilePlan, tile: Tile, digest: str | None = None) -> TileValues:
    """The entries of a tile; with ``digest`` (SHA-256) its bytes are checked first."""
    path = chunk_path(folder, plan, tile)
    with disk_trouble(f"reading {path}"):
        data = np.fromfile(path, dtype=np.uint8)
    if len(data) != plan.tile_bytes or (digest is not None and sha256(data.data) != digest):
        raise StoreError(
            f"the tile {path} must have the {plan.tile_bytes:,} bytes and the checksum that were recorded, but it has "
            "other ones: the file is damaged. Run the same gs.ntk(..., out=...) again, which recomputes it."
        )
    return data.view(_dtype(plan)).reshape(plan.chunks)[plan.valid(tile)]


def sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _dtype(plan: TilePlan) -> np.dtype[Any]:
    return np.dtype(plan.dtype).newbyteorder("<")
