"""The one writer of a run: arrays first, then the line that commits them."""

import errno
import hashlib
import math
import os
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import SupportsIndex, TypeVar

import numpy as np

from gramscope.base.errors import InputError
from gramscope.base.json_values import clean_text
from gramscope.store.arrays import Array, encode_arrays, read_arrays
from gramscope.store.files import Disk, Lines, read_inside, temporary_name
from gramscope.store.lock import WriterLock
from gramscope.store.logged_scalars import LOGGED_FILE, LoggedScalars, decode_logged, encode_logged, newest_logged
from gramscope.store.meta import fresh_meta, read_meta, write_meta
from gramscope.store.names import check_name
from gramscope.store.records import (
    ARRAYS_FOLDER,
    SCALARS_FILE,
    Arrays,
    Content,
    DamagedLine,
    Record,
    arrays_file,
    check_step,
    decode_line,
    encode_line,
    newest_view,
)
from gramscope.store.store_errors import RunExists, StoreError, disk_trouble

Line = TypeVar("Line")


class RunWriter:
    """Appends steps to a run directory so that a step is either wholly there or not at all.

    A step's arrays are written to a temporary file, flushed and renamed; then one line of ``scalars.jsonl``, written by
    one ``write`` and flushed, commits the step with the SHA-256 of the arrays. A kill, a full disk or a loss of power
    at any moment leaves every earlier step readable. Made by :meth:`create` or :meth:`resume`; a context manager.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunWriter.create(folder.name + "/a", {"model": "Sequential"}) as writer:
    ...     record = writer.append(0, {"loss": 2.3}, {"spectrum/0.weight": [1.0, 4.0]})
    >>> record.arrays.file
    'arrays/step_00000000.safetensors'
    >>> with RunWriter.resume(folder.name + "/a") as writer:
    ...     record = writer.append(50, {"loss": 0.7})
    >>> record.attempt, writer.last_step
    (1, 50)
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, meta: Content, lock: WriterLock, scalars: int, disk: Disk) -> None:
        """For :meth:`create` and :meth:`resume`, which hand over the lock and the open ``scalars.jsonl``."""
        self.path = path
        self.meta = meta
        self.attempt = 0
        self.last_step: int | None = None
        self._lock, self._disk = lock, disk
        self._scalars = Lines(path / SCALARS_FILE, scalars, disk)
        self._logged: Lines | None = None  # made when there is something to log
        self._mutex = threading.RLock()
        self._loose: list[Path] = []  # files of arrays that no line names yet
        self._lowest = 0  # the lowest step that may come next
        self._kept: list[Record] = []  # of earlier attempts, that this one goes on from
        self._start = clock.monotonic()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        meta: Mapping[str, object] | None = None,
        *,
        fsync: bool = True,
        disk: Disk | None = None,
    ) -> "RunWriter":
        """A new run in ``path``, which must not hold committed steps; ``meta`` goes to ``meta.json``.

        ``fsync=False`` spares the flushes: a killed process still loses nothing, a power cut may lose the last seconds.
        """
        path, disk = Path(path).absolute(), disk or Disk(fsync=fsync)
        content = fresh_meta(path, meta or {})
        if path.exists() and not path.is_dir():
            raise StoreError(f"a run needs a directory, but {path} is a file. Choose another path.", errno.ENOTDIR)
        with disk_trouble(f"creating the run {path}"):
            disk.make_directory(path)
            writer = cls._open(path, content, disk, os.O_CREAT)
            with writer._closed_on_error():
                if b"\n" in read_inside(path, SCALARS_FILE):
                    raise RunExists(
                        f"a new run needs a directory without one, but {path} holds committed steps. Continue it "
                        "(RunWriter.resume), choose another directory, or remove it."
                    )
                writer._scalars.cut(0)
                if (path / LOGGED_FILE).exists():
                    disk.remove(path / LOGGED_FILE)
                write_meta(path, content, disk)
                disk.flush_directory(path.parent)
        return writer

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        step: SupportsIndex | None = None,
        *,
        fsync: bool = True,
        disk: Disk | None = None,
    ) -> "RunWriter":
        """Continue a run as a new attempt, after a crash or from an earlier checkpoint.

        ``step`` is the step of the checkpoint that training restarts from: what was committed after it is superseded
        (kept in the file and in ``Run.history()``, no longer in ``Run.scalars()``). Without ``step`` nothing is
        superseded until a step is appended that is not after the last one.
        """
        path, disk = Path(path).absolute(), disk or Disk(fsync=fsync)
        after = None if step is None else check_step(step)
        content = read_meta(path)
        with disk_trouble(f"resuming the run {path}"):
            writer = cls._open(path, content, disk, 0)
            with writer._closed_on_error():
                writer._recover(after)
        return writer

    @classmethod
    def _open(cls, path: Path, meta: Content, disk: Disk, create: int) -> "RunWriter":
        lock = WriterLock(path, disk)
        try:
            arrays = path / ARRAYS_FOLDER
            disk.make_directory(arrays)
            if arrays.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(arrays))
            scalars = disk.open(path / SCALARS_FILE, os.O_RDWR | os.O_APPEND | create)
        except BaseException:
            lock.release()
            raise
        return cls(path, meta, lock, scalars, disk)

    def _recover(self, after: int | None) -> None:
        """Cut off a torn tail, take the next attempt number, and mark what a restart at ``after`` supersedes."""
        records, damaged = _readable(self._scalars, decode_line)
        logged: list[LoggedScalars] = []
        if (self.path / LOGGED_FILE).exists():
            self._logged = self._open_logged()
            logged, lost = _readable(self._logged, decode_logged)
            damaged += lost
        # Each line that cannot be read may hide one attempt more: its arrays must not be overwritten.
        attempts = [record.attempt for record in records] + [line.attempt for line in logged]
        self.attempt = max(attempts, default=-1) + 1 + damaged
        view = newest_view(records)
        kept = [record for record in view if after is None or record.step <= after]
        numbers = newest_logged(logged, records).values()
        steps = np.concatenate([[record.step for record in view], *(found.steps for found in numbers)])
        known = steps if after is None else steps[steps <= after]
        self.last_step = int(known.max()) if len(known) else None
        self._kept = kept
        self._start = clock.monotonic() - (kept[-1].time if kept and 0 <= kept[-1].time < math.inf else 0.0)
        self._lowest = after or 0
        for name in (self.path / ARRAYS_FOLDER).glob(".step_*.tmp"):
            self._disk.remove_if_possible(name)
        if len(known) < len(steps):
            assert after is not None
            self._commit(Record(after + 1, self.elapsed, self.attempt, {}, event="resume"))

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the run; a resumed run goes on from its last record."""
        return clock.monotonic() - self._start

    def append(
        self,
        step: SupportsIndex,
        scalars: Mapping[str, object] | None = None,
        arrays: Mapping[str, object] | None = None,
        *,
        failures: Mapping[str, object] | None = None,
        time: float | None = None,
    ) -> Record:
        """Commit one step; after it returns, the step survives a kill (and with ``fsync`` a loss of power).

        ``scalars`` are numbers (NaN and infinity too), ``arrays`` anything that ``numpy.asarray`` takes, ``failures``
        the messages of measures that failed. Steps rise within an attempt. A full disk or the like raises
        :class:`StoreError` and leaves the run as it was; the same step may be appended again later.
        """
        with self._writing():
            number = self._next_step(step)
            values = {check_name(name, "a scalar"): _number(value, name) for name, value in (scalars or {}).items()}
            messages = {check_name(n, "a measure"): clean_text(message) for n, message in (failures or {}).items()}
            seconds = self.elapsed if time is None else _number(time, "time")
            data = encode_arrays(arrays) if arrays else None
            with disk_trouble(f"committing step {number} to {self.path}"):
                self._clean_up()
                stored = None if data is None else self._write_arrays(number, data, arrays or {})
                record = Record(number, seconds, self.attempt, values, stored, messages)
                self._commit(record)
            self.last_step, self._lowest = number, number + 1
            return record

    def log(self, numbers: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
        """Keep numbers by name, each at its own step: name -> (steps, values).

        They are handed to the operating system and not flushed: a killed process still loses nothing, a loss of power
        may lose the last seconds. A step needs no record to have numbers.
        """
        with self._writing():
            lines = b"".join(
                encode_logged(check_name(name, "a number that is logged"), self.attempt, steps, values)
                for name, (steps, values) in numbers.items()
            )
            with disk_trouble(f"writing numbers to {self.path}"):
                if self._logged is None:
                    self._logged = self._open_logged()
                self._logged.cut()
                self._logged.check()
                try:
                    self._logged.append(lines, flush=False)
                except BaseException:
                    with suppress(OSError):
                        self._logged.cut()
                    raise

    def _open_logged(self) -> Lines:
        path = self.path / LOGGED_FILE
        return Lines(path, self._disk.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), self._disk)

    def first_array(self, name: str) -> Array | None:
        """The array of that name from the first of the steps that a resumed run goes on from; None if there is none."""
        for record in self._kept:
            if record.arrays is not None and name in record.arrays.names:
                return read_arrays(self.path, record.arrays, check=True)[name]
        return None

    def _next_step(self, step: SupportsIndex) -> int:
        number = check_step(step)
        if number < self._lowest:
            raise InputError(
                f"steps must rise within an attempt: {self._lowest} or later must come next, got {number}. "
                f"After a restart from an earlier checkpoint use RunWriter.resume(path, step={number})."
            )
        return number

    def _write_arrays(self, step: int, data: bytes, arrays: Mapping[str, object]) -> Arrays:
        file = arrays_file(step, self.attempt)
        self._loose += [temporary_name(self.path / file), self.path / file]
        try:
            self._disk.write_whole(self.path / file, data)
        except BaseException:
            self._take_back()
            raise
        return Arrays(file, hashlib.sha256(data).hexdigest(), tuple(arrays))

    def _commit(self, record: Record) -> None:
        try:
            self._scalars.append(encode_line(record))
        except BaseException:
            self._take_back()
            raise
        self._loose.clear()

    def _take_back(self) -> None:
        """Undo a commit that failed; if that fails too, the next append does it (:meth:`_clean_up`)."""
        with suppress(OSError):
            self._tidy()

    def _tidy(self) -> None:
        """First the line, then the arrays that it names: no reader may find a line without them."""
        self._scalars.cut()
        self._loose = [path for path in self._loose if not self._disk.remove_if_possible(path)]

    def _clean_up(self) -> None:
        """Before new bytes: nothing but committed lines may be in the file."""
        self._scalars.check()
        self._tidy()

    def close(self) -> None:
        """End writing and free the lock; the run can be resumed. Closing twice is fine."""
        try:
            with disk_trouble(f"closing {self.path}"):  # network disks may report a full disk only now
                if self._logged is not None:
                    self._logged.close()
                self._scalars.close()
        finally:
            self._lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if os.getpid() != self._lock.pid:
            raise StoreError(
                f"this writer of {self.path} belongs to process {self._lock.pid} and cannot be used in its child "
                f"{os.getpid()}. Write from the parent (in DDP, from rank 0)."
            )
        with self._mutex:
            if not self._lock.held:
                raise StoreError(
                    f"the writer of {self.path} is closed. Go on with RunWriter.resume({str(self.path)!r})."
                )
            yield

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._lock.held else "closed"
        return f"RunWriter({str(self.path)!r}, attempt={self.attempt}, last_step={self.last_step}, {state})"


def _readable(lines: Lines, decode: Callable[[bytes], Line]) -> tuple[list[Line], int]:
    """What the whole lines of a file say, and how many of them cannot be read; a torn tail is cut off."""
    data = read_inside(lines.path.parent, lines.path.name)
    lines.length = data.rfind(b"\n") + 1
    if lines.length < len(data):
        lines.cut(lines.length)
    found: list[Line] = []
    damaged = 0
    for line in data[: lines.length].split(b"\n")[:-1]:
        try:
            found.append(decode(line))
        except DamagedLine:
            damaged += 1
    return found, damaged


def _number(value: object, name: str) -> float:
    """Any single number (Python's, numpy's, a tensor of one entry) as a float."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("it is text")
        if hasattr(value, "detach"):  # a loss with its graph: torch warns when such a one is read
            value = value.detach()
        return float(value)  # type: ignore[arg-type]  # what cannot be one is named below
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"the scalar {name!r} must be one real number, got {type(value).__name__} ({error}). "
            "Reduce it, e.g. .mean(), or pass it as an array."
        ) from error
