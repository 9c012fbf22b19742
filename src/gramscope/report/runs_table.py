"""Several runs as a table: settings, results, verdict and the last value of every measure, one row a run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gramscope.base.json_values import Json
from gramscope.diagnose.divergence import LOSSES
from gramscope.diagnose.finding import Diagnosis
from gramscope.report.figure import rounded
from gramscope.report.panels.kernels import largest
from gramscope.report.panels.richness import feature_change
from gramscope.report.regimes import kernel_drift, regime
from gramscope.report.view import RunView, Series
from gramscope.store.names import SKIPPED

Cell = str | int | float | None
# Shown at once, after what the verdict rests on; the other measures wait behind a switch.
FIRST = ("kernel/alignment", "richness")
TEST = ("accuracy/test", "accuracy/val", "accuracy", "accuracy/probe")


@dataclass(frozen=True)
class Column:
    """``group`` is "run", "setting", "result" or "measure"; ``first``: shown without being asked for."""

    key: str
    group: str
    first: bool
    cells: Sequence[Cell]

    def json(self) -> dict[str, Json]:
        numeric = all(not isinstance(cell, str) for cell in self.cells)
        return {**vars(self), "cells": list(self.cells), "numeric": numeric}


@dataclass(frozen=True)
class RunsTable:
    """Columns of one length; ``same`` are the settings that all runs share, which need no column."""

    columns: Sequence[Column]
    same: Mapping[str, Cell]

    def json(self) -> dict[str, Json]:
        return {"columns": [column.json() for column in self.columns], "same": dict(self.same)}


def runs_table(views: Sequence[RunView], diagnoses: Sequence[Diagnosis] = ()) -> RunsTable:
    settings = [_flat(view.meta.get("config")) for view in views]
    keys = _in_order_of_appearance(settings)
    same = {key: settings[0].get(key) for key in keys if len({_plain(row.get(key)) for row in settings}) == 1}
    columns = [Column("run", "run", True, [view.name for view in views])]
    columns.append(Column("verdict", "run", True, [regime(view) for view in views]))
    if diagnoses:
        columns.append(Column("diagnosis", "run", True, [found[0].kind.replace("_", " ") for found in diagnoses]))
    columns += [Column(key, "setting", True, [row.get(key) for row in settings]) for key in keys if key not in same]
    columns.append(Column("last step", "result", len({view.end for view in views}) > 1, [view.end for view in views]))
    columns += _results(views) + _measures(views)
    return RunsTable(_told_apart(columns), same)


def _told_apart(columns: Sequence[Column]) -> list[Column]:
    """A learning rate may be both a setting and a measure: the second of one name says which it is."""
    seen: set[str] = set()
    found = []
    for column in columns:
        key = f"{column.key} ({column.group})" if column.key in seen else column.key
        seen.add(key)
        found.append(replace(column, key=key))
    return found


def _results(views: Sequence[RunView]) -> list[Column]:
    found = []
    for title, names in (("final loss", LOSSES), ("final accuracy", TEST)):
        # One name for all runs, so that a column compares like with like.
        name = next((n for n in names if any(n in view.series for view in views)), None)
        if name is not None:
            key = title if name in ("loss", "accuracy") else f"{title}, {name.partition('/')[2]}"
            found.append(Column(key, "result", True, [_last(view, name) for view in views]))
    return found


def _measures(views: Sequence[RunView]) -> list[Column]:
    found = []
    changes = [feature_change(view) for view in views]
    if any(series is not None for series in changes):
        cells = [None if series is None else _end(series) for series in changes]
        found.append(Column("feature change", "measure", True, cells))
    drifts = [kernel_drift(view) for view in views]
    if any(series is not None for series in drifts):
        cells = [None if series is None else rounded(largest(series)[1]) for series in drifts]
        found.append(Column("largest kernel drift", "measure", True, cells))
    names = [name for name in _in_order_of_appearance([view.series for view in views]) if name != SKIPPED]
    order = [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]
    return found + [Column(name, "measure", name in FIRST, [_last(view, name) for view in views]) for name in order]


def _last(view: RunView, name: str) -> Cell:
    return _end(view.series[name]) if name in view.series else None


def _end(series: Series) -> Cell:
    """The last value; None where it is not finite, because an earlier one is not where the run ended."""
    value = float(series.values[-1]) if len(series.values) else math.nan
    return rounded(value) if math.isfinite(value) else None


def _flat(config: object, prefix: str = "") -> dict[str, Cell]:
    """Settings by dotted name; what is neither text nor a number is written out.

    >>> _flat({"lr": 0.1, "model": {"width": 64, "layers": [1, 2]}})
    {'lr': 0.1, 'model.width': 64, 'model.layers': '[1, 2]'}
    """
    found: dict[str, Cell] = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            found[f"{prefix}{key}"] = value if plain or value is None else str(value)
    return found


def _plain(value: Cell) -> tuple[str, Cell]:
    return type(value).__name__, value


def _in_order_of_appearance(rows: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
