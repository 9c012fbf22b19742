"""A disk that fails on demand: at one of its calls, or at all calls from one on, until it is healed."""

import errno
import os
from pathlib import Path

from gramscope.store import Disk


class FailingDisk(Disk):
    """Counts its calls from 1 and fails at the ``fail_at``-th, for ever after too where ``lasting``.

    ``short``: a failing write takes half of its bytes first, as a disk does that runs full in the middle.
    """

    def __init__(self, fail_at: int, *, number: int = errno.ENOSPC, lasting: bool = False, short: bool = False) -> None:
        super().__init__(fsync=True)
        self.fail_at, self.number, self.lasting, self.short = fail_at, number, lasting, short
        self.calls: list[str] = []
        self.failed = False
        self.healed = False

    def heal(self) -> None:
        self.healed = True

    def _fails(self, call: str) -> bool:
        self.calls.append(call)
        count = len(self.calls)
        fails = not self.healed and (count >= self.fail_at if self.lasting else count == self.fail_at)
        self.failed = self.failed or fails
        return fails

    def _call(self, call: str) -> None:
        if self._fails(call):
            raise OSError(self.number, os.strerror(self.number))

    def make_directory(self, path: Path) -> None:
        self._call("make_directory")
        super().make_directory(path)

    def open(self, path: Path, flags: int) -> int:
        self._call("open")
        return super().open(path, flags)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if self._fails("write"):
            if not self.short:
                raise OSError(self.number, os.strerror(self.number))
            self.short = False
            return super().write(descriptor, data[: len(data) // 2])
        return super().write(descriptor, data)

    def truncate(self, descriptor: int, length: int) -> None:
        self._call("truncate")
        super().truncate(descriptor, length)

    def flush(self, descriptor: int) -> None:
        self._call("flush")  # and no more: a real flush takes milliseconds and is not what these tests are about

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename")
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._call("remove")
        super().remove(path)
