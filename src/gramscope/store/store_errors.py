"""The one error of the disk, with the reason in words and what to do about it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gramscope.base.errors import GramscopeError

_REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space and go on, what was committed is safe.",
    errno.EDQUOT: "The disk quota is used up: free some space and go on, what was committed is safe.",
    errno.EFBIG: "The file may not grow further (ulimit -f, or a limit of the file system): raise the limit.",
    errno.EROFS: "The file system is mounted read-only: choose another directory, or remount it.",
    errno.EACCES: "This user may not do that there: change the permissions, or choose another directory.",
    errno.EPERM: "This user may not do that there: change the permissions, or choose another directory.",
    errno.ENOENT: "A part of the path does not exist and cannot be made, or was removed meanwhile: check the path.",
    errno.EEXIST: "A file stands where a directory must be: choose another path.",
    errno.ENOTDIR: "A part of the path is a file where a directory must be: choose another path.",
    errno.ELOOP: "It is a symbolic link, and links inside a run directory are not followed: copy the real file there.",
    errno.EMFILE: "Too many files are open in this process: close some, or raise ulimit -n.",
    errno.EIO: "The disk reports a hardware or network fault: look at the system log.",
    errno.ENAMETOOLONG: "The path is too long for this file system: choose a shorter one.",
}


class StoreError(GramscopeError):
    """A run cannot be written or read: full or read-only disk, no permission, a second writer, a damaged file.

    ``errno`` is the operating system's number where there is one (``errno.ENOSPC``, ...), else ``None``.

    >>> StoreError("the disk is full", errno.ENOSPC).errno == errno.ENOSPC
    True
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message, number)
        self.message = message
        self.errno = number

    def __str__(self) -> str:
        return self.message


class RunExists(StoreError):
    """A new run was to be made where one is already."""


@contextmanager
def disk_trouble(doing: str) -> Iterator[None]:
    """Turns any ``OSError`` inside into a :class:`StoreError` that says what was being done.

    >>> with disk_trouble("opening the run"):
    ...     raise OSError(errno.ENOSPC, "No space left on device", "/runs/a")
    Traceback (most recent call last):
    gramscope.store.store_errors.StoreError: opening the run failed: No space left on device (/runs/a). The disk is \
full: free some space and go on, what was committed is safe.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or (os.strerror(error.errno) if error.errno else repr(error))
        where = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
        remedy = _REMEDIES.get(error.errno or 0, "Check the disk, then go on: what was committed is safe.")
        raise StoreError(f"{doing} failed: {reason}{where}. {remedy}", error.errno) from error
