"""Claims: which process computes which tile, agreed on through files alone, so that any may die and any may join."""

import json
import os
import platform
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from gramscope.store.store_errors import disk_trouble

# Seconds after which the claim of a process that gives no sign of life may be taken over.
LEASE = 120.0


@dataclass(frozen=True)
class Holder:
    """A process, wherever it runs. ``machine`` is that of its number; ``started`` tells reused numbers apart."""

    token: str
    machine: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> "Holder":
        pid = os.getpid()
        return cls(uuid.uuid4().hex[:12], _machine(), pid, _started(pid))

    def is_dead(self) -> bool:
        """Certainly dead: it ran on this machine and does so no more. False where that cannot be known."""
        return bool(self.started) and self.machine == _machine() and _started(self.pid) != self.started


class Claims:
    """The claims that this process holds on tiles of one folder.

    A claim is a file that is created only where there is none. A thread gives a sign of life (it sets the times of the
    files) four times in a lease. A claim may be taken over when its holder is dead, which is known at once on the same
    machine, or when its lease has run out, by the clock of the file system. Should two processes hold one tile all
    the same, both compute the same bytes and each writes them whole: time is lost, and nothing else.
    """

    def __init__(self, folder: Path, lease: float = LEASE) -> None:
        self.folder, self.lease = folder, lease
        self.holder = Holder.this_process()
        self._held: set[Path] = set()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._clock = folder / f".clock.{self.holder.token}"
        with disk_trouble(f"making claims in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._clock.touch()
        self._thread = threading.Thread(target=self._signs_of_life, name="gramscope claims", daemon=True)
        self._thread.start()

    def take(self, name: str) -> bool:
        """Claim a tile; False where another process has it."""
        path = self.folder / name
        if self._create(path):
            return True
        holder = _read(path)
        if not (holder is not None and holder.is_dead()) and not self._lease_is_over(path):
            return False
        abandoned = path.with_name(f".{name}.{self.holder.token}.abandoned")
        try:
            path.rename(abandoned)  # of several processes that try, one succeeds
            abandoned.unlink(missing_ok=True)
        except FileNotFoundError:
            return False
        return self._create(path)

    def release(self, name: str) -> None:
        path = self.folder / name
        with self._lock:
            self._held.discard(path)
        if (holder := _read(path)) is not None and holder.token == self.holder.token:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give everything back."""
        self._closing.set()
        self._thread.join()
        for path in list(self._held):
            self.release(path.name)
        self._clock.unlink(missing_ok=True)

    def _create(self, path: Path) -> bool:
        with disk_trouble(f"claiming {path}"):
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return False
            try:
                os.write(descriptor, json.dumps(vars(self.holder)).encode())
            except OSError:  # a full disk: nobody else should wait for this claim
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        with self._lock:
            self._held.add(path)
        return True

    def remove_abandoned(self, folder: Path) -> None:
        """Temporary files that processes left behind when they were killed, and their clocks."""
        for path in [*folder.glob(".*.tmp"), *self.folder.glob(".clock.*"), *self.folder.glob(".*.abandoned")]:
            if path != self._clock and self._lease_is_over(path):
                path.unlink(missing_ok=True)

    def _lease_is_over(self, path: Path) -> bool:
        """No sign of life for so long, by the clock of the file system, which dates both files."""
        try:
            os.utime(self._clock)
            return self._clock.stat().st_mtime - path.stat().st_mtime > self.lease
        except FileNotFoundError:
            return True  # it was removed meanwhile

    def _signs_of_life(self) -> None:
        while not self._closing.wait(self.lease / 4):
            with self._lock:
                held = [self._clock, *self._held]
            for path in held:
                try:
                    os.utime(path)
                except OSError:
                    continue  # it was taken over, or the disk is away for a while


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None  # it is gone, or its holder is just writing it


def _machine() -> str:
    """The machine, its boot, and the space of its process numbers: containers may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, by the machine's clock; "" where it is not there, a zombie, or this cannot be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
