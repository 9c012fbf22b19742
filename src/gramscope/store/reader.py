"""Reading a run: whole, while it grows, or after a crash. Needs no lock and no torch."""

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

from gramscope.base.errors import InputError
from gramscope.base.html import html_table
from gramscope.base.pyplot import Figure
from gramscope.base.user_warnings import warn
from gramscope.store.arrays import Array, read_arrays
from gramscope.store.damage import Damage, damage_of
from gramscope.store.files import Tail
from gramscope.store.logged_scalars import LOGGED_FILE, LoggedScalars, decode_logged, newest_logged
from gramscope.store.meta import read_meta
from gramscope.store.records import (
    SCALARS_FILE,
    Arrays,
    Content,
    DamagedLine,
    Record,
    check_step,
    decode_line,
    view_add,
)
from gramscope.store.store_errors import StoreError

# Tables and labelled arrays need pandas and xarray, which take a second to import: only where they are asked for.
if TYPE_CHECKING:
    from pandas import DataFrame
    from xarray import DataArray, Dataset

    from gramscope.store.views import Series

Line = TypeVar("Line")


def open_run(path: str | os.PathLike[str]) -> "Run":
    """The run in the directory ``path``, to read; also while it is being written (:meth:`Run.refresh`).

    >>> import tempfile
    >>> import numpy as np
    >>> from gramscope.store import RunWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunWriter.create(folder.name + "/a") as writer:
    ...     _ = writer.append(0, {"loss": 2.0}, {"kernel": np.eye(2)})
    ...     _ = writer.append(50, {"loss": 0.5, "accuracy": 0.9})
    >>> run = open_run(folder.name + "/a")
    >>> run.steps, run.scalars()["loss"].tolist(), run.array("kernel", 0).tolist()
    ([0, 50], [2.0, 0.5], [[1.0, 0.0], [0.0, 1.0]])
    >>> folder.cleanup()
    """
    _check_no_parent(Path(path))
    return Run(path)


def _check_no_parent(path: Path) -> None:
    """A folder of runs is not a run; the error names what is inside."""
    from gramscope.store.folders import find_runs, is_run

    if not os.path.isdir(path) or is_run(path):
        return
    inside = find_runs(path)
    if inside:
        raise InputError(
            f"{path} must be a run directory, but it is a folder that holds {len(inside)} of them: "
            f"{_some([str(run.relative_to(path)) for run in inside])}. Open one of them, or all with "
            f"gramscope.store.open_runs({str(path)!r}); gramscope.report({str(path)!r}) draws all."
        )


class Run:
    """The content of a run directory, of its newest attempt; made by :func:`open_run`.

    Only lines that end in a newline and agree with their checksum count: a torn tail is not there yet. ``records`` are
    all commit records in the order of the file, ``damaged`` (and ``damaged_logged``) the numbers, from 1, of lines that
    cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # scripts change their directory
        self.meta: Content = {}
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self.records: list[Record] = []
        self.damaged: list[int] = []
        self.damaged_logged: list[int] = []
        self._view: list[Record] = []
        self._logged: list[LoggedScalars] = []
        self._tails = Tail(self.path, SCALARS_FILE), Tail(self.path, LOGGED_FILE)
        self._loaded: tuple[Arrays, dict[str, Array]] | None = None

    def refresh(self) -> bool:
        """Read what was committed since; whether anything has changed."""
        meta = read_meta(self.path)
        changed = meta != self.meta
        self.meta = meta
        scalars, logged = self._tails
        try:
            records = scalars.news()
        except StoreError as error:
            raise StoreError(f"{error} A run needs its {SCALARS_FILE}.", error.errno) from error
        # A loop that logs nothing leaves no such file.
        numbers = logged.news() if logged.count or os.path.lexists(logged.path) else []
        if records is None or numbers is None:
            self._forget()
            self.refresh()
            return True
        for record in self._readable(scalars, records, decode_line, self.damaged):
            self.records.append(record)
            view_add(self._view, record)
        self._logged += self._readable(logged, numbers, decode_logged, self.damaged_logged)
        return changed or bool(records or numbers)

    def _readable(
        self, tail: Tail, lines: list[bytes], decode: Callable[[bytes], Line], damaged: list[int]
    ) -> list[Line]:
        found: list[Line] = []
        reasons = {}
        for place, line in enumerate(lines, tail.count - len(lines) + 1):
            try:
                found.append(decode(line))
            except DamagedLine as error:
                reasons[place] = str(error) or "no commit record"
        damaged += reasons
        if reasons:
            _warn_of_damage(tail.path, reasons)
        return found

    @property
    def lines(self) -> int:
        """How many lines were read: more of them mean that the run has grown."""
        return sum(tail.count for tail in self._tails)

    @property
    def name(self) -> str:
        """The run's name, by default that of its directory."""
        return str(self.meta.get("name") or self.path.resolve().name)

    @property
    def steps(self) -> list[int]:
        """The committed steps of the newest view, rising."""
        return [record.step for record in self._view]

    @property
    def view(self) -> list[Record]:
        """The records of the newest view, in order of steps."""
        return list(self._view)

    @property
    def attempts(self) -> list[int]:
        """Numbers of the attempts that have committed something, rising."""
        return sorted({record.attempt for record in self.records})

    def record(self, step: SupportsIndex) -> Record:
        """The newest record of a step."""
        number = check_step(step)
        at = bisect_left(self._view, number, key=lambda record: record.step)
        if at == len(self._view) or self._view[at].step != number:
            raise InputError(
                f"{self.name} must hold the step that is asked for, got {number}. It has {_some(self.steps)}."
            )
        return self._view[at]

    def scalars(self) -> "DataFrame":
        """Scalars by record (rows) and name (columns, in order of appearance), newest view, float64.

        What was logged at the step of a record is in its row; :meth:`logged` has every step. NaN stands for a
        recorded NaN and for "not recorded at this step"; ``run.record(step).scalars`` and ``run.failures()`` tell
        which.
        """
        from gramscope.store import views

        return views.with_logged(views.scalars(self._view), self.logged())

    def logged(self) -> dict[str, "Series"]:
        """What the loop logged, by name: every number at its own step, whether or not a record stands there."""
        from gramscope.store import views

        return views.logged(self.logged_numbers())

    def logged_numbers(self) -> dict[str, LoggedScalars]:
        """The same as plain arrays, which need no pandas."""
        return newest_logged(self._logged, self.records)

    def history(self) -> "DataFrame":
        """Scalars of all attempts, superseded ones too; index ``attempt``, ``step``, ``superseded``."""
        from gramscope.store import views

        return views.history(self.records, self._view)

    def times(self) -> "Series":
        """Seconds since the start of the run, by step, newest view."""
        from gramscope.store import views

        return views.times(self._view)

    def failures(self) -> "DataFrame":
        """Measures that failed, newest view: columns ``step``, ``measure``, ``message``."""
        from gramscope.store import views

        return views.failures(self._view)

    def array_names(self, step: SupportsIndex | None = None) -> list[str]:
        """Names of the arrays of one step, or of all steps in order of appearance."""
        records = self._view if step is None else [self.record(step)]
        return list(dict.fromkeys(name for r in records if r.arrays for name in r.arrays.names))

    def array_steps(self, name: str) -> list[int]:
        """Steps of the newest view that hold the array ``name``."""
        return [record.step for record in self._view if record.arrays and name in record.arrays.names]

    def array(self, name: str, step: SupportsIndex, *, attempt: int | None = None, check: bool = False) -> Array:
        """One array of one step; with ``attempt`` of a superseded one, with ``check`` its SHA-256 is compared."""
        if attempt is None:
            record = self.record(step)
        else:
            found = [r for r in self.records if (r.step, r.attempt, r.event) == (check_step(step), attempt, "step")]
            if not found:
                raise InputError(f"{self.name} holds no step {step} of attempt {attempt}. See run.history().")
            record = found[-1]
        if record.arrays is None or name not in record.arrays.names:
            there = self.array_steps(name)
            hint = f"That array is there at {_some(there)}" if there else f"The run has {_some(self.array_names())}"
            raise InputError(f"step {step} of {self.name} holds no array {name!r}. {hint}.")
        return self._arrays(record.arrays, check)[name].copy()

    def _arrays(self, arrays: Arrays, check: bool = False) -> dict[str, Array]:
        # The last file is kept: who asks for one array of a step mostly asks for its others next.
        if check or self._loaded is None or self._loaded[0] != arrays:
            loaded = read_arrays(self.path, arrays, check=check)
            missing = [name for name in arrays.names if name not in loaded]
            if missing:
                raise StoreError(
                    f"{self.path / arrays.file} lacks {_some(missing)} of its commit record. It was altered."
                )
            self._loaded = (arrays, loaded)
        return self._loaded[1]

    def stacked(self, name: str, steps: Iterable[SupportsIndex] | None = None) -> "DataArray":
        """The array ``name`` over all its steps (or those given): dimensions ``step``, ``axis_0``, ``axis_1``, ...

        Where the shape changes over the run, the smaller ones are filled up with NaN; ``attrs["padded"]`` says so.
        """
        from gramscope.store import views

        chosen = self._steps_with([name], steps)
        if not chosen:
            raise InputError(
                f"{self.name} holds no array {name!r}{' at these steps' if steps is not None else ''}. "
                f"It has {_some(self.array_names())}."
            )
        return views.stack(name, {step: self.array(name, step) for step in chosen})

    def _steps_with(self, names: list[str], steps: Iterable[SupportsIndex] | None) -> list[int]:
        wanted = None if steps is None else {self.record(step).step for step in steps}
        return [
            record.step
            for record in self._view
            if (wanted is None or record.step in wanted)
            and record.arrays
            and not set(names).isdisjoint(record.arrays.names)
        ]

    def spectra(self, steps: Iterable[SupportsIndex] | None = None) -> "Dataset":
        """Spectra of the weights over time: a variable for each weight, dimensions ``step`` and ``rank_<size>``.

        From the arrays ``spectrum/<weight>``, the eigenvalues of ``WᵀW``. A step at which a weight has none is NaN, and
        the variable's ``attrs["missing_steps"]`` names it.
        """
        from gramscope.store import views

        names = [name for name in self.array_names() if name.startswith("spectrum/")]
        # Step by step, so that each file is opened once.
        by_name: dict[str, dict[int, Array]] = {name: {} for name in names}
        chosen = self._steps_with(names, steps)
        for step in chosen:
            arrays = self.record(step).arrays
            assert arrays is not None
            for name in arrays.names:
                if name in by_name:
                    by_name[name][step] = self.array(name, step)
        return views.spectra({name: arrays for name, arrays in by_name.items() if arrays}, chosen)

    def kernels(self, name: str = "kernel", steps: Iterable[SupportsIndex] | None = None) -> "DataArray":
        """Kernels over time: dimensions ``step``, ``example``, ``other``; coordinate ``label`` where recorded."""
        from gramscope.store import views

        kernels = self.stacked(name, steps)
        labels_name = f"{name}/labels"
        chosen = self._steps_with([labels_name], [int(step) for step in kernels.step.values])
        labels = views.stack(labels_name, {step: self.array(labels_name, step) for step in chosen}) if chosen else None
        return views.kernels(kernels, labels)

    def verify(self) -> list[Damage]:
        """All damage: lines that cannot be read, arrays that are missing or whose SHA-256 is not the committed one.

        An empty list means that every committed step, superseded ones too, reads back as it was written.
        """
        return damage_of(self.path, self.records, {SCALARS_FILE: self.damaged, LOGGED_FILE: self.damaged_logged})

    def to_csv(self, path: str | os.PathLike[str], *, history: bool = False) -> Path:
        """Write the scalars (or the history of all attempts) as CSV."""
        from gramscope.store import export

        return export.to_csv(self.history() if history else self.scalars(), path)

    def to_parquet(self, path: str | os.PathLike[str], *, history: bool = False) -> Path:
        """Write the scalars (or the history of all attempts) as parquet; needs pyarrow (``gramscope[export]``)."""
        from gramscope.store import export

        return export.to_parquet(self.history() if history else self.scalars(), path)

    def to_netcdf(self, path: str | os.PathLike[str]) -> Path:
        """Write scalars and arrays of the newest view as netCDF; needs h5netcdf, netCDF4 or scipy."""
        from gramscope.store import export

        return export.to_netcdf(self.to_dataset(), path)

    def to_dataset(self) -> "Dataset":
        """Scalars and arrays of the newest view as one xarray Dataset, ``meta.json`` in its attributes."""
        from gramscope.store import views

        stacks = [self.stacked(name) for name in self.array_names()]
        attributes = {"gramscope_run": self.name, "meta": json.dumps(self.meta)}
        return views.dataset(self.scalars(), self.times(), stacks, attributes)

    def plot(self, names: str | Sequence[str] = "*") -> Figure:
        """A matplotlib figure: one drawing for each measure, its layers as lines; ``names`` chooses, e.g. "share/*".

        :func:`gramscope.report` draws more, with words and references.
        """
        from gramscope.store.run_pictures import picture_of_run

        return picture_of_run(self.name, self._series(), names)

    def _series(self) -> dict[str, tuple[Array, Array]]:
        """Steps and values by name: of the records, and of what was logged where it has the name too."""
        recorded = {str(name): column.dropna() for name, column in self.scalars().items()}
        return {
            name: (each.index.to_numpy(), each.to_numpy())
            for name, each in {**recorded, **self.logged()}.items()
            if len(each)
        }

    def _repr_html_(self) -> str:
        """In a notebook: the first and the last value of everything the run holds."""
        rows = [
            [name, f"{values[0]:.4g}", f"{steps[0]:,}", f"{values[-1]:.4g}", f"{steps[-1]:,}"]
            for name, (steps, values) in self._series().items()
        ]
        notes = [f"{self.path}: {len(self._view):,} records. run.plot() draws them, gramscope.report(run) tells more."]
        return html_table(f"Run {self.name}", ["name", "first", "at step", "last", "at step"], rows, notes)

    def __repr__(self) -> str:
        count = len(self._view)
        span = f"{count} record{'s' * (count > 1)} up to step {self.steps[-1]}" if count else "no record yet"
        restarts = f", attempt {self.attempts[-1] + 1}" if len(self.attempts) > 1 else ""
        return f"Run({str(self.path)!r}, {span}{restarts})"


def _warn_of_damage(file: Path, reasons: Mapping[int, str]) -> None:
    """One warning however many lines: a damaged disk spoils them by the hundred."""
    first, reason = next(iter(reasons.items()))
    told = (
        f"line {first} of {file} is damaged ({reason}) and is left out"
        if len(reasons) == 1
        else f"{len(reasons):,} lines of {file} are damaged (the first is line {first}: {reason}) and are left out"
    )
    warn(f"{told}; run.verify() lists all damage.")


def _some(things: Sequence[object]) -> str:
    shown = ", ".join(repr(thing) for thing in things[:8])
    return (f"{shown}, ... ({len(things)} in all)" if len(things) > 8 else shown) or "none"
