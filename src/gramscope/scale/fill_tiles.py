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
from gramscope.scale.tile_folder import ARRAY, TileFolder, tile_name
from gramscope.scale.tile_plan import Tile
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
    if tile is not None and stored.plan.tile != planned.tile:
        high, wide = stored.plan.tile
        warn(f"{folder} goes on with the tiles it was begun with, of {high} x {wide} examples; tile={tile} is ignored.")
    tiles = TileFolder(folder, stored.plan if memory is None else replace(stored.plan, memory=planned.memory))
    with disk_trouble(f"preparing {folder}"):
        tiles.prepare(disk, writer)
    _forget_damaged(tiles)
    _warn_of_space(tiles)
    claims = Claims(folder / CLAIMS, lease)
    with disk_trouble(f"tidying {folder}"):
        claims.remove_abandoned(folder / ARRAY)
    worker = _Worker(job, tiles, claims, disk)
    try:
        worker.run()
    finally:
        worker.stop()
        claims.close()


@dataclass
class _Worker:
    """One process: claims a tile, computes it, writes it while the next one is computed."""

    job: KernelJob
    tiles: TileFolder
    claims: Claims
    disk: Disk
    writing: list[Future[None]] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        self.waiting = WAITING.get(self.job.device.type, WAITING["cuda"])
        self.pool = ThreadPoolExecutor(self.waiting, "gramscope tiles")

    def run(self) -> None:
        missing, pause = self._missing(), FIRST_POLL
        total, shown = len(self.tiles.plan.tiles), 0
        with progress(f"kernel, {total} tiles", total if rank() == 0 else 0) as advance:
            while missing:
                before = self.computed
                for tile in missing:
                    self._try(tile)
                    done = total - len(missing) + self.computed - before  # at least; others count at the next look
                    for _ in range(shown, done):
                        advance()
                    shown = max(shown, done)
                self._wait_for_writing(0)
                missing = self._missing()
                if missing and self.computed == before:
                    time.sleep(pause)
                    pause = min(POLL, 1.5 * pause)

    def stop(self) -> None:
        wait(self.writing)
        self.pool.shutdown()

    def _missing(self) -> list[Tile]:
        """A rank's own share first, so that ranks seldom meet; tiles on the diagonal, which take half, at the end."""
        tiles = sorted(self.tiles.missing(), key=lambda tile: not self.tiles.plan.mirrored(tile))
        ranks, mine = world_size(), rank() % world_size()
        return [tile for ahead in range(ranks) for tile in tiles[(mine + ahead) % ranks :: ranks]]

    def _try(self, tile: Tile) -> None:
        """Compute a tile unless it is finished, or another process is at it."""
        path, name = self.tiles.record_path(tile), tile_name(tile)
        if path.exists() or not self.claims.take(name):
            return
        if path.exists():  # finished just before the claim
            self.claims.release(name)
            return
        begun = time.perf_counter()
        with _slow_named_once(again=self.computed > 0):
            values = self.job.compute(self.tiles.plan, tile)
        mirror = _on_the_cpu(_turned(values)) if self.tiles.plan.mirrored(tile) else None
        values = _on_the_cpu(values)
        self._wait_for_writing(self.waiting)
        self.writing.append(self.pool.submit(self._write, tile, values, mirror, time.perf_counter() - begun))
        self.computed += 1

    def _write(self, tile: Tile, values: Tensor, mirror: Tensor | None, seconds: float) -> None:
        process, token = f"{platform.node()} {os.getpid()}", self.claims.holder.token
        turned = None if mirror is None else mirror.numpy()
        with disk_trouble(f"writing tile {tile_name(tile)} of {self.tiles.path}"):
            self.tiles.write(tile, values.numpy(), turned, seconds, process, self.disk, token)
            self.claims.release(tile_name(tile))

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


def _forget_damaged(tiles: TileFolder) -> None:
    """Finished tiles whose bytes are not those recorded count as missing from here on."""
    for tile in tiles.damaged(tiles.finished()[rank() % world_size() :: world_size()]):
        name = tile_name(tile)
        warn(f"tile {name} of {tiles.path} is damaged (its checksum is wrong); it is computed again.")
        with disk_trouble(f"removing the record of tile {name} of {tiles.path}"):
            tiles.record_path(tile).unlink(missing_ok=True)


def _warn_of_space(tiles: TileFolder) -> None:
    """Before hours of work: what is still to be written, against what the disk has."""
    if rank() > 0 or not hasattr(os, "statvfs"):
        return
    status = os.statvfs(tiles.path)
    free = status.f_bavail * status.f_frsize
    needed = sum(tiles.plan.tile_bytes * (1 + tiles.plan.mirrored(tile)) for tile in tiles.missing())
    if needed > free:
        warn(
            f"{tiles.path} still needs {needed:,} bytes, but its disk has {free:,} free. The job stops when it is "
            "full; nothing is lost then, and it goes on once there is space."
        )


@contextmanager
def _slow_named_once(again: bool) -> Iterator[None]:
    """Each tile would say again which parameters are slow."""
    with warnings.catch_warnings():
        if again:
            warnings.simplefilter("ignore", SlowPathWarning)
        yield
