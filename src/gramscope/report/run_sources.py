"""From run directories to views: opened, named apart, and damage noted."""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from gramscope.base.errors import InputError
from gramscope.base.garbage import collection_put_off
from gramscope.report.view import RunView, Series, joined, series_by_name
from gramscope.store import Run, find_runs, open_run
from gramscope.store.logged_scalars import LOGGED_FILE
from gramscope.store.records import SCALARS_FILE

RunSource = str | os.PathLike[str] | Run
Sources = RunSource | Sequence[RunSource]


def open_all(runs: Sources) -> list[Run]:
    """One run or several, given as directories, as folders of runs, as patterns ("runs/*") or as opened runs."""
    given = [runs] if isinstance(runs, str | os.PathLike | Run) else list(runs)
    if not given:
        raise InputError("runs must name at least one run directory, got none. Pass one, e.g. 'runs/a'.")
    for run in given:
        if not isinstance(run, str | os.PathLike | Run):
            raise InputError(
                f"runs must be directories or opened runs, got {type(run).__name__}. Pass a path, e.g. 'runs/a'."
            )
    return [opened for run in given for opened in ([run] if isinstance(run, Run) else _opened(run))]


def _opened(path: str | os.PathLike[str]) -> list[Run]:
    inside = find_runs(path)
    # Without a run inside the reader says what is wrong with the path.
    return [Run(run) for run in inside] if inside else [open_run(path)]


def views_of(runs: Sequence[Run]) -> list[RunView]:
    names = apart([run.name for run in runs], [run.path for run in runs])
    return [_view(run, name, index) for index, (run, name) in enumerate(zip(runs, names, strict=True))]


def apart(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Names that tell the runs apart: where two have the same, their directories, and numbers as a last resort.

    >>> apart(["a", "a", "b"], [Path("x/a"), Path("y/a"), Path("b")])
    ['x/a', 'y/a', 'b']
    >>> apart(["a", "a"], [Path("x/a"), Path("x/a")])
    ['x/a (1)', 'x/a (2)']
    """
    shown = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return [
        name if shown.count(name) == 1 else f"{name} ({shown[: place + 1].count(name)})"
        for place, name in enumerate(shown)
    ]


def _view(run: Run, name: str, index: int) -> RunView:
    records = run.view

    def load(step: int) -> Mapping[str, np.ndarray]:
        held = run.array_names(step)
        # The first read compares the checksum of the whole file; the others come from the same bytes.
        return {array: run.array(array, step, check=place == 0) for place, array in enumerate(held)}

    steps = [record.step for record in records]
    with collection_put_off():
        array_steps: dict[str, list[int]] = {}
        for record in records:
            for array in record.arrays.names if record.arrays else ():
                array_steps.setdefault(array, []).append(record.step)
        series = series_by_name(steps, [record.scalars for record in records])
    for logged, found in run.logged_numbers().items():
        finite = np.where(np.isfinite(found.values), found.values, np.nan)
        own = Series(found.steps.astype(np.float64), finite)
        series[logged] = joined(series[logged], own) if logged in series else own
    view = RunView(
        name,
        index,
        run.meta,
        steps,
        [record.time for record in records],
        series,
        array_steps,
        load,
        [(record.step, measure, message) for record in records for measure, message in record.failures.items()],
        [(old.step, new.step) for old, new in pairwise(records) if new.attempt > old.attempt],
    )
    for file, damaged in ((SCALARS_FILE, run.damaged), (LOGGED_FILE, run.damaged_logged)):
        if damaged:
            more = f", … ({len(damaged):,} in all)" if len(damaged) > 8 else ""
            view.notes.append(f"Damaged lines of {file} are left out: {', '.join(map(str, damaged[:8]))}{more}.")
    superseded = sum(record.event == "step" for record in run.records) - len(records)
    if superseded:
        view.notes.append(
            f"{superseded:,} records were superseded by a restart from an earlier checkpoint; the newest are shown."
        )
    return view
