"""The folder of a kernel: zarr's own layout (version 2), which any reader of zarr opens, and a record of each tile.

    K/.zgroup, .zmetadata       the group, and all meta data once more, for readers that take it from one file
    K/kernel/.zarray, .zattrs   shape, tiles, dtype, names of the axes
    K/kernel/0.1                tile (0, 1): its entries, rows first, little-endian, not compressed
    K/tiles/0.1.json            its record, written last: a tile counts as there when its record does

A tile that is not there reads as NaN. Specification: zarr-specs, storage format version 2 (2021).
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gramscope.base.json_values import JSONObject
from gramscope.scale.tile_plan import Tile, TilePlan, TileValues
from gramscope.store.files import Disk
from gramscope.store.store_errors import StoreError, disk_trouble

ARRAY, RECORDS = "kernel", "tiles"
HASHING_THREADS = 4  # hashlib lets other threads run meanwhile


@dataclass(frozen=True)
class TileRecord:
    """A finished tile: SHA-256 of its file and of its mirror image's, the seconds it took, host and process."""

    sha256: str
    mirror_sha256: str | None
    seconds: float
    process: str


def tile_name(tile: Tile) -> str:
    return f"{tile[0]}.{tile[1]}"


@dataclass(frozen=True)
class TileFolder:
    """The files of a kernel that is cut by ``plan``."""

    path: Path
    plan: TilePlan

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.plan.dtype).newbyteorder("<")

    def chunk_path(self, tile: Tile) -> Path:
        return self.path / ARRAY / (tile_name(tile) if self.plan.reduce == "trace" else f"{tile[0]}.0.{tile[1]}.0")

    def record_path(self, tile: Tile) -> Path:
        return self.path / RECORDS / f"{tile_name(tile)}.json"

    def metadata(self) -> dict[str, JSONObject]:
        """The JSON files of the zarr group, by path; they are the same from every process."""
        array = {
            "zarr_format": 2,
            "shape": list(self.plan.shape),
            "chunks": list(self.plan.chunks),
            "dtype": self.dtype.str,
            "compressor": None,
            "fill_value": "NaN",
            "order": "C",
            "filters": None,
        }
        files: dict[str, JSONObject] = {
            ".zgroup": {"zarr_format": 2},
            f"{ARRAY}/.zarray": array,
            f"{ARRAY}/.zattrs": {"_ARRAY_DIMENSIONS": list(self.plan.dims)},
        }
        return {**files, ".zmetadata": {"zarr_consolidated_format": 1, "metadata": dict(files)}}

    def prepare(self, disk: Disk, writer: str) -> None:
        for name in (ARRAY, RECORDS):
            disk.make_directory(self.path / name)
        for name, content in self.metadata().items():
            disk.write_whole(self.path / name, json.dumps(content, indent=1).encode(), writer)

    def write(
        self, tile: Tile, values: TileValues, mirror: TileValues | None, seconds: float, process: str, disk: Disk,
        writer: str,
    ) -> None:  # fmt: skip
        """The tile, its mirror image where there is one, and last its record."""
        digest = self._write_chunk(tile, values, disk, writer)
        turned = None if mirror is None else self._write_chunk((tile[1], tile[0]), mirror, disk, writer)
        record = TileRecord(digest, turned, seconds, process)
        disk.write_whole(self.record_path(tile), json.dumps(asdict(record)).encode(), writer)

    def _write_chunk(self, tile: Tile, values: TileValues, disk: Disk, writer: str) -> str:
        """Whole tiles, filled up with NaN at the edges of the kernel; returns the SHA-256."""
        if values.shape != self.plan.chunks:
            whole = np.full(self.plan.chunks, np.nan, dtype=self.dtype)
            whole[self.plan.valid(tile)] = values
            values = whole
        data = np.ascontiguousarray(values, dtype=self.dtype).data.cast("B")
        disk.write_whole(self.chunk_path(tile), data, writer)
        return hashlib.sha256(data).hexdigest()

    def read(self, tile: Tile, digest: str | None = None) -> TileValues:
        """The entries of a tile; with ``digest`` (SHA-256) its bytes are checked first."""
        path = self.chunk_path(tile)
        with disk_trouble(f"reading {path}"):
            data = np.fromfile(path, dtype=np.uint8)
        right = len(data) == self.plan.tile_bytes
        if not right or (digest is not None and hashlib.sha256(data.data).hexdigest() != digest):
            raise StoreError(
                f"the tile {path} must have the {self.plan.tile_bytes:,} bytes and the checksum that were recorded, "
                "but it has other ones: the file is damaged. Run the same gs.ntk(..., out=...) again, which "
                "recomputes it."
            )
        return data.view(self.dtype).reshape(self.plan.chunks)[self.plan.valid(tile)]

    def record(self, tile: Tile) -> TileRecord | None:
        """None where the tile is not finished, or its record is damaged, which is the same."""
        try:
            return TileRecord(**json.loads(self.record_path(tile).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def finished(self) -> list[Tile]:
        """The tiles that have a record."""
        folder = self.path / RECORDS
        with disk_trouble(f"listing {folder}"):
            names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
        return [tile for tile in self.plan.tiles if f"{tile_name(tile)}.json" in names]

    def missing(self) -> list[Tile]:
        done = set(self.finished())
        return [tile for tile in self.plan.tiles if tile not in done]

    def damaged(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Those of the finished tiles whose files are missing or have other bytes than were recorded."""
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            whole = list(pool.map(self._is_whole, tiles))
        return [tile for tile, fine in zip(tiles, whole, strict=True) if not fine]

    def _is_whole(self, tile: Tile) -> bool:
        record = self.record(tile)
        if record is None or (self.plan.mirrored(tile) and record.mirror_sha256 is None):
            return False
        try:
            self.read(tile, record.sha256)
            if record.mirror_sha256 is not None:
                self.read((tile[1], tile[0]), record.mirror_sha256)
        except StoreError:
            return False
        return True
