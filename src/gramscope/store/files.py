"""The file layer: every change of the disk in one small class, and reads that cannot be led out of the run."""

import errno
import os
import secrets
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from gramscope.store.store_errors import StoreError, disk_trouble

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
# A pipe put in place of a file would keep the reader waiting for ever.
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# File systems that cannot flush a directory say so with one of these; there is nothing to flush there then.
_CANNOT_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class Disk:
    """What the writer does to a disk, one method a system call, so that tests can make each of them fail.

    ``fsync=False`` leaves flushing to the operating system: a kill of the process still loses nothing, a loss of
    power may lose the last seconds.

    >>> import tempfile
    >>> from gramscope.store import RunWriter
    >>> with RunWriter.create(tempfile.mkdtemp() + "/run", disk=Disk(fsync=False)) as writer:
    ...     writer.append(0, {"loss": 2.3}).scalars
    {'loss': 2.3}
    """

    def __init__(self, *, fsync: bool = True) -> None:
        self.flushes = fsync

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | _NOFOLLOW | _CLOEXEC, 0o666)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def flush(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    # What follows is made of the calls above.

    def flush_if_asked(self, descriptor: int) -> None:
        if self.flushes:
            self.flush(descriptor)

    def flush_directory(self, path: Path) -> None:
        """Flush the names in a directory; without it a power loss may undo a rename."""
        if not self.flushes or not _DIRECTORY:
            return
        descriptor = os.open(path, os.O_RDONLY | _DIRECTORY | _CLOEXEC)
        try:
            self.flush(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_FLUSH:
                raise
        finally:
            os.close(descriptor)

    def write_whole(self, path: Path, data: bytes | memoryview, writer: str = "") -> None:
        """``path`` holds all of ``data`` or what it held before: temporary file, flush, rename, directory flush.

        Where several processes may write one file, ``writer`` names this one, so that none takes another's temporary.
        """
        self.replace_whole(path, temporary_name(path, writer), lambda temporary: self._fill(temporary, data))

    def replace_whole(self, path: Path, temporary: Path, fill: Callable[[Path], object]) -> None:
        """The same for whatever ``fill`` writes to the temporary file."""
        try:
            fill(temporary)
            self.rename(temporary, path)
        except BaseException:  # an interrupt too
            self.remove_if_possible(temporary)
            raise
        self.flush_directory(path.parent)

    def _fill(self, path: Path, data: bytes | memoryview) -> None:
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self.write(descriptor, rest) :]
            self.flush_if_asked(descriptor)
        finally:
            os.close(descriptor)

    def remove_if_possible(self, path: Path) -> bool:
        """Whether it is gone. Tidying up after a failure must not hide the failure; what stays behind is never read."""
        try:
            self.remove(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class Lines:
    """A file that grows by whole lines; what a write that failed left behind is cut off, at once or before the next."""

    def __init__(self, path: Path, descriptor: int, disk: Disk) -> None:
        self.path, self._descriptor, self._disk = path, descriptor, disk
        self.length = 0  # up to the end of the last line
        self._torn = False  # whether bytes after that may be on the disk
        self.close = weakref.finalize(self, os.close, descriptor)

    def append(self, data: bytes, flush: bool = True) -> None:
        self._torn = True
        # One write, so that no reader and no crash between two writes can see half a line as two.
        taken = self._disk.write(self._descriptor, data)
        if taken < len(data):
            raise OSError(errno.ENOSPC, f"only {taken} of {len(data)} bytes were taken", str(self.path))
        if flush:
            self._disk.flush_if_asked(self._descriptor)
        self.length += len(data)
        self._torn = False

    def cut(self, length: int | None = None) -> None:
        """Cut off what is no whole line, or all after ``length``."""
        if length is not None:
            self.length = length
        if self._torn or length is not None:
            self._disk.truncate(self._descriptor, self.length)
            self._disk.flush_if_asked(self._descriptor)
            self._torn = False

    def check(self) -> None:
        """Raise where the file was removed, or changed by somebody else."""
        status = os.fstat(self._descriptor)
        if status.st_nlink == 0:
            raise StoreError(
                f"{self.path} was removed while the run was being written. Close this writer and create a new run.",
                errno.ENOENT,
            )
        if not self._torn and status.st_size != self.length:
            raise StoreError(
                f"{self.path} must have {self.length} bytes, but has {status.st_size}: another program "
                "has changed it. Close this writer, look at the run, and go on with RunWriter.resume."
            )


def write_file(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """``path`` holds all of ``content`` or what it held before. Several processes may write it at once."""
    disk = Disk()
    temporary = temporary_name(path, f"{os.getpid()}-{secrets.token_hex(4)}")
    fill = content if callable(content) else lambda free: disk._fill(free, content)
    disk.replace_whole(path, temporary, fill)


def temporary_name(path: Path, writer: str = "") -> Path:
    """Where a file is written before it takes its own name."""
    return path.with_name(f".{path.name}.{writer}.tmp" if writer else f".{path.name}.tmp")


def open_inside(root: Path, relative: str) -> int:
    """A descriptor of the regular file ``root/relative``; symbolic links below ``root`` are not followed."""
    *folders, last = relative.split("/")
    if any(part in ("", ".", "..") for part in (*folders, last)):
        raise StoreError(f"a file of a run must lie inside {root}, got {relative!r}. The run's records were altered.")
    if os.open not in os.supports_dir_fd:  # Windows
        real = os.path.realpath(root / relative)
        if real != os.path.join(os.path.realpath(root), *folders, last):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(root / relative))
        return _checked_regular(os.open(real, os.O_RDONLY | getattr(os, "O_BINARY", 0)), root / relative)
    folder = os.open(root, os.O_RDONLY | _DIRECTORY | _CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | _DIRECTORY | _NOFOLLOW | _CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(last, os.O_RDONLY | _NOFOLLOW | _CLOEXEC | _NONBLOCK, dir_fd=folder)
    except OSError as error:
        # The part alone would not tell the user which run it is in.
        raise OSError(error.errno, error.strerror, str(root / relative)) from error
    finally:
        os.close(folder)
    return _checked_regular(file, root / relative)


def _checked_regular(descriptor: int, path: Path) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise StoreError(f"{path} must be a plain file, but it is a directory, pipe or device. Restore the run's file.")


def read_inside(root: Path, relative: str, start: int = 0) -> bytes:
    """The bytes of ``root/relative`` from ``start`` to its present end."""
    with disk_trouble(f"reading {root / relative}"):
        descriptor = open_inside(root, relative)
        with os.fdopen(descriptor, "rb") as file:
            file.seek(start)
            return file.read()


class Tail:
    """The whole lines that were added to a file of a run since the last look; a torn end is not there yet."""

    def __init__(self, root: Path, relative: str) -> None:
        self.path, self._root, self._relative = root / relative, root, relative
        self.count = 0
        self._offset = 0
        self._last = b""

    def news(self) -> list[bytes] | None:
        """New lines; None where the file was cut or replaced, so that it must be read anew."""
        # The last line is read again: it must still be the same.
        overlap = len(self._last)
        data = read_inside(self._root, self._relative, self._offset - overlap)
        if data[:overlap] != self._last:
            return None
        *lines, _ = data[overlap:].split(b"\n")
        if lines:
            self._last = lines[-1] + b"\n"
            self._offset += sum(map(len, lines)) + len(lines)
            self.count += len(lines)
        return lines
