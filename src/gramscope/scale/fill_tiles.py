"""Fill a folder with the tiles that are missing, together with any other process that does the same."""

import os
import platform
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from gramscope.base.memory_budget import Memory
from gramscope.base.progress_bar import progress
from gramscope.base.user_warnings import SlowPathWarning, warn
from gramscope.scale.claims import LEASE, Claims
from gramscope.scale.kernel_job import KernelJob, rank, world_size
from gramscope.scale.manifest import Manifest, create_or_read
from gramscope.scale.tile_plan import Tile, TilePlan
from gramscope.scale.tile_records import (
    RECORDS,
    TileRecord,
    damaged,
    finished,
    record_name,
    record_path,
    write_record,
)
from gramscope.scale.zarr_chunks import ARRAY, chunk_path, encode, sha256, write_metadata
from gramscope.store.files import Disk
from gramscope.store.store_errors import disk_trouble

CLAIMS = "claims"
# Tiles that may wait to be written while the next is computed, and threads that write: a GPU is faster than a disk, and
# its tiles wait in the memory of the machine, of which it needs little else.
WAITING = {"cpu": 1, "cuda": 6}
# Seconds between two looks, while the last tiles are with other processes: at first, and after many.
FIRST_POLL, POLL = 0.02, 0.5


def fill_tiles(
    job: KernelJob, folder: Path, memory: Memory = None, tile: int | None = None, *, lease: float = LEASE,
    disk: Disk | None = None,
) -> None:  # fmt: skip
    """Compute all tiles of ``job`` that ``folder`` does not have; returns when it has all of them.

    A folder that was begun keeps its tiles, and its memory unless ``memory`` says another. Finished tiles are checked
    first: each process of a job (``RANK`` and ``WORLD_SIZE``) checks its share, and damaged ones are computed again.
    """
    # Not flushed tile by tile: what a loss of power tears, the checksum finds when the job goes on.
    disk = Disk(fsync=False) if disk is None else disk
    planned = job.plan(memory, tile)
    manifest = Manifest.of(planned, job.fingerprints(), job.options())
    writer = f"{os.getpid()}-{time.time_ns():x}"
    stored = create_or_read(folder, manifest, disk, writer)
    stored.check_same(manifest, folder)
    _name_other_versions(stored, manifest, folder)
    plan = stored.plan if memory is None else replace(stored.plan, memory=planned.memory)
    with disk_trouble(f"preparing {folder}"):
        write_metadata(folder, plan, disk, writer)
        disk.make_directory(folder / RECORDS)
    _forget_damaged(folder, plan)
    _warn_of_space(folder, plan)
    claims = Claims(folder / CLAIMS, lease)
    with disk_trouble(f"tidying {folder}"):
        claims.remove_abandoned(folder / ARRAY)
    worker = _Worker(job, folder, plan, claims, disk)
    try:
        worker.run()
    finally:
        worker.stop()
        claims.close()


@dataclass
class _Worker:
    """One process: claims a tile, computes it, writes it while the next one is computed."""

    job: KernelJob
    folder: Path
    plan: TilePlan
    claims: Claims
    disk: Disk
    writing: list[Future[None]] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        self.waiting = WAITING.get(self.job.device.type, WAITING["cuda"])
        self.pool = ThreadPoolExecutor(self.waiting, "gramscope tiles")

    def run(self) -> None:
        missing = self._missing()
        total, shown = len(self.plan.tiles), 0
        label, pause = f"kernel, {total} tiles", FIRST_POLL
        with progress(label, total if rank() == 0 else 0) as advance:
            while missing:
                found_work = False
                for tile in missing:
                    found_work |= self._try(tile)
                    done = total - len(missing) + self.computed  # at least; others are counted at the next look
                    for _ in range(shown, done):
                        advance()
                    shown = max(shown, done)
                self._wait_for_writing(0)
                missing, self.computed = self._missing(), 0
                if missing and not found_work:
                    time.sleep(pause)
                    pause = min(POLL, 2 * pause)

    def stop(self) -> None:
        wait(self.writing)
        self.pool.shutdown()

    def _missing(self) -> list[Tile]:
        """Processes begin at different places, so that they seldom meet."""
        done = finished(self.folder, self.plan)
        tiles = [tile for tile in self.plan.tiles if tile not in done]
        start = len(tiles) * rank() // world_size() if rank() < world_size() else 0
        return tiles[start:] + tiles[:start]

    def _try(self, tile: Tile) -> bool:
        """Compute a tile unless it is finished, or another process is at it."""
        path, name = record_path(self.folder, tile), record_name(tile)
        if path.exists() or not self.claims.take(name):
            return False
        if path.exists():  # finished just before the claim
            self.claims.release(name)
            return False
        begun = time.perf_counter()
        with _slow_named_once(again=self.computed > 0):
            values = self.job.compute(self.plan, tile)
        mirror = _on_the_cpu(_turned(values)) if self.plan.mirrored(tile) else None
        values = _on_the_cpu(values)
        self._wait_for_writing(self.waiting)
        self.writing.append(self.pool.submit(self._write, tile, values, mirror, time.perf_counter() - begun))
        self.computed += 1
        return True

    def _write(self, tile: Tile, values: Tensor, mirror: Tensor | None, seconds: float) -> None:
        digests: list[str | None] = []
        with disk_trouble(f"writing tile {record_name(tile)} of {self.folder}"):
            for place, entries in ((tile, values), ((tile[1], tile[0]), mirror)):
                if entries is None:
                    digests.append(None)
                    continue
                data = encode(entries.numpy(), self.plan, place)
                self.disk.write_whole(chunk_path(self.folder, self.plan, place), data, self.claims.holder.token)
                digests.append(sha256(data))
            record = TileRecord(str(digests[0]), digests[1], seconds, f"{platform.node()} {os.getpid()}")
            write_record(self.folder, tile, record, self.disk, self.claims.holder.token)
            self.claims.release(record_name(tile))

    def _wait_for_writing(self, most: int) -> None:
        """Until no more than ``most`` tiles wait; raises what went wrong with one."""
        while len(self.writing) > most:
            self.writing.pop(0).result()


def _turned(values: Tensor) -> Tensor:
    """The mirror image of a tile: rows and columns exchanged."""
    return (values.mT if values.dim() == 2 else values.permute(2, 3, 0, 1)).contiguous()


def _on_the_cpu(values: Tensor) -> Tensor:
    """A copy there, through pinned memory: a GPU fills it far faster, and torch keeps it for the next tile."""
    if not values.is_cuda:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu").copy_(values)


def _forget_damaged(folder: Path, plan: TilePlan) -> None:
    """Finished tiles whose bytes are not those recorded count as missing from here on."""
    mine = [
        tile
        for place, tile in enumerate(sorted(finished(folder, plan)))
        if place % world_size() == rank() % world_size()
    ]
    for tile in damaged(folder, plan, mine):
        warn(f"tile {record_name(tile)} of {folder} is damaged (its checksum is wrong); it is computed again.")
        with disk_trouble(f"removing the record of tile {record_name(tile)} of {folder}"):
            record_path(folder, tile).unlink(missing_ok=True)


def _warn_of_space(folder: Path, plan: TilePlan) -> None:
    """Before hours of work: what is still to be written, against what the disk has."""
    missing = [tile for tile in plan.tiles if tile not in finished(folder, plan)]
    needed = sum(plan.tile_bytes * (2 if plan.mirrored(tile) else 1) for tile in missing)
    status = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if status is not None and rank() == 0 and needed > status.f_bavail * status.f_frsize:
        free = status.f_bavail * status.f_frsize
        warn(
            f"{folder} still needs {needed:,} bytes, but its disk has {free:,} free. The job stops when it is full; "
            "nothing is lost then, and it goes on once there is space."
        )


def _name_other_versions(stored: Manifest, now: Manifest, folder: Path) -> None:
    if stored.versions.get("torch") != now.versions.get("torch"):
        warn(
            f"{folder} was begun with torch {stored.versions.get('torch')} and goes on with "
            f"{now.versions.get('torch')}: tiles of the two may differ by rounding."
        )


@contextmanager
def _slow_named_once(again: bool) -> Iterator[None]:
    """Each tile would say again which parameters are slow."""
    with warnings.catch_warnings():
        if again:
            warnings.simplefilter("ignore", SlowPathWarning)
        yield
