"""One writer for each run: a lock that the operating system drops when its holder dies, however it dies."""

import errno
import json
import os
import platform
import time
import weakref
from pathlib import Path

from gramscope.base.user_warnings import warn
from gramscope.store.files import Disk
from gramscope.store.store_errors import StoreError, disk_trouble

LOCK_FILE = "writer.lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_HELD: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()


class WriterLock:
    """The right to write to a run, from construction to :meth:`release` or the death of the process.

    ``flock`` belongs to the open file: a second writer is refused in another process and in this one. The file's
    text (pid, host, time) only serves the message; it does not hold the lock, and stays behind.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._descriptor: int | None = None
        self.path = folder / LOCK_FILE
        self.pid = os.getpid()
        with disk_trouble(f"locking {folder} for writing"):
            self._take(disk)
        _HELD.add(self)

    def _take(self, disk: Disk) -> None:
        while True:
            descriptor = disk.open(self.path, os.O_RDWR | os.O_CREAT)
            try:
                _flock(descriptor, self.path)
                # Somebody may have removed the file between the two calls: then this lock would guard nothing.
                if _same_file(descriptor, self.path):
                    self._sign(descriptor, disk)
                    self._descriptor = descriptor
                    return
            except BlockingIOError:
                raise StoreError(_refusal(self.path, os.pread(descriptor, 4096, 0)), errno.EWOULDBLOCK) from None
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _sign(self, descriptor: int, disk: Disk) -> None:
        holder = {"pid": self.pid, "host": platform.node(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        disk.truncate(descriptor, 0)
        disk.write(descriptor, json.dumps(holder).encode() + b"\n")

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        # Closing, not LOCK_UN: unlocking in a forked child would take the lock away from the parent.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = release


def _flock(descriptor: int, path: Path) -> None:
    """Take the lock or raise ``BlockingIOError``; where the file system knows no locks, warn and go on without."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        reason = "this system has no flock"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        reason = f"its file system has no locks ({error.strerror})"
    else:
        return
    warn(
        f"{path.parent} cannot be locked: {reason}. The run is written anyway; make sure that no second "
        "process writes to it."
    )


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _refusal(path: Path, text: bytes) -> str:
    try:
        holder = json.loads(text)
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
    except (ValueError, KeyError, TypeError):  # the holder is just signing
        pid, host, since = -1, "unknown", "now"
    here = pid == os.getpid() and host == platform.node()
    who = "this same process" if here else f"process {pid} on host {host}" if pid >= 0 else "another process"
    remedy = "Call close() on the other writer" if here else "Wait for it, stop it"
    return (
        f"a run must have one writer, but {path.parent} is being written by {who} (pid {pid}, host {host}, since "
        f"{since}). {remedy}, or choose another directory. Readers need no lock."
    )


def _drop_in_child() -> None:
    # A data loader's worker that outlives a killed trainer would otherwise keep the lock.
    for lock in list(_HELD):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
