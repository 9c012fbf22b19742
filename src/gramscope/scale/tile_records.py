"""Records of finished tiles: one small file each, written last; a tile counts as there when its record does."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from gramscope.scale.tile_plan import Tile, TilePlan
from gramscope.scale.zarr_chunks import read_chunk
from gramscope.store.files import Disk
from gramscope.store.store_errors import StoreError, disk_trouble

RECORDS = "tiles"
HASHING_THREADS = 4  # hashlib lets other threads run meanwhile


@dataclass(frozen=True)
class TileRecord:
    """A finished tile: SHA-256 of its file and of its mirror image's, the seconds it took, host and process."""

    sha256: str
    mirror_sha256: str | None
    seconds: float
    process: str


def record_name(tile: Tile) -> str:
    return f"{tile[0]}.{tile[1]}"


def record_path(folder: Path, tile: Tile) -> Path:
    return folder / RECORDS / f"{record_name(tile)}.json"


def write_record(folder: Path, tile: Tile, record: TileRecord, disk: Disk, writer: str) -> None:
    disk.write_whole(record_path(folder, tile), json.dumps(asdict(record)).encode(), writer)


def read_record(folder: Path, tile: Tile) -> TileRecord | None:
    """None where the tile is not finished, or its record is damaged, which is the same."""
    try:
        return TileRecord(**json.loads(record_path(folder, tile).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def finished(folder: Path, plan: TilePlan) -> set[Tile]:
    """The tiles that have a record."""
    wanted = set(plan.tiles)
    with disk_trouble(f"listing {folder / RECORDS}"):
        names = [entry.name for entry in (folder / RECORDS).iterdir()] if (folder / RECORDS).is_dir() else []
    found = set()
    for name in names:
        parts = name.removesuffix(".json").split(".")
        if name.endswith(".json") and len(parts) == 2 and all(part.isdigit() for part in parts):
            found.add((int(parts[0]), int(parts[1])))
    return found & wanted


def damaged(folder: Path, plan: TilePlan, tiles: list[Tile]) -> list[Tile]:
    """Those of the finished tiles whose files are missing or have other bytes than were recorded."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        whole = list(pool.map(lambda tile: _is_whole(folder, plan, tile), tiles))
    return [tile for tile, fine in zip(tiles, whole, strict=True) if not fine]


def _is_whole(folder: Path, plan: TilePlan, tile: Tile) -> bool:
    record = read_record(folder, tile)
    if record is None or (plan.mirrored(tile) and record.mirror_sha256 is None):
        return False
    files = [(tile, record.sha256)]
    if record.mirror_sha256 is not None:
        files.append(((tile[1], tile[0]), record.mirror_sha256))
    try:
        for place, digest in files:
            read_chunk(folder, plan, place, digest)
    except StoreError:
        return False
    return True
