"""Runs that differ in a few settings: a measure against each of them, heat maps of two, and the best runs.

A page of many runs has a drawing of any measure against any setting (``runs.js``), so it takes the heat maps alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from gramscope.report.figure import Axis, Colour, Control, Heat, Line, Mark, Numbers, Panel, Plot
from gramscope.report.panels.drawing import number
from gramscope.report.runs_table import Cell, Column, RunsTable

TITLE = "Swept settings"
HOW = (
    "One measure at the end of the runs against each setting that differs: a point for each run, a line through the "
    "means. Heat maps show the means over two settings."
)
PAIRS = "Two settings at once"
HOW_PAIRS = "One measure at the end of the runs, its mean over all runs with these two values."
FEWEST_RUNS = 3
MOST_SETTINGS, MOST_MEASURES, BEST = 4, 24, 3
LOG_SPAN = 20.0  # values that span more are drawn on a logarithmic axis
OWN_TO_A_RUN = "watch."  # settings of the watcher, such as its folder
SEED = "seed"


@dataclass(frozen=True)
class Setting:
    """A setting that differs: its values in order, and for each run the place of its value, -1 where it has none."""

    key: str
    values: Sequence[Cell]
    places: Sequence[int]

    @property
    def numeric(self) -> bool:
        return all(isinstance(value, int | float) for value in self.values)

    @property
    def labels(self) -> list[str]:
        """Its values as one reads them: 0.00333, not 0.0033333333333333335."""
        return [f"{value:.4g}" if isinstance(value, float) else str(value) for value in self.values]

    @property
    def log(self) -> bool:
        numbers = [float(value) for value in self.values if isinstance(value, int | float)]
        return self.numeric and min(numbers) > 0 and max(numbers) > LOG_SPAN * min(numbers)


def panel(table: RunsTable, *, pairs_only: bool = False) -> Panel | None:
    """The panel of a sweep; None where runs are few or differ in no setting. ``pairs_only``: its heat maps alone."""
    table = _without_diverged(table)
    settings, measures = swept(table), _measures(table)
    if len(table.columns[0].cells) < FEWEST_RUNS or not settings or not measures:
        return None
    at = list(range(len(measures)))
    values = [_values(column) for column in measures]
    plots = [
        Plot(f"against {setting.key}", _axis(setting), Axis("value"), [_points(setting, y) for y in values], at)
        for setting in settings
        if setting.numeric and not pairs_only
    ]
    pairs = list(combinations(settings, 2)) if pairs_only else _pairs(settings)
    plots += [
        Plot(f"means over {down.key} and {across.key}", Axis(across.key), Axis(down.key),
             [[_heat(down, across, y)] for y in values], at)
        for down, across in pairs
    ]  # fmt: skip
    if not plots:
        return None
    control = Control("select", "Measure", [column.key for column in measures], 0)
    title, how, best = (PAIRS, HOW_PAIRS, []) if pairs_only else (TITLE, HOW, best_runs(table))
    return Panel("swept", title, how, best, plots, control, _left_out(table, settings, measures))


def swept(table: RunsTable) -> list[Setting]:
    """Settings that differ between runs; seeds only if nothing else does, since runs of several seeds are averaged."""
    found = []
    for column in table.columns:
        values = list(dict.fromkeys(cell for cell in column.cells if cell is not None))
        if column.group == "setting" and not column.key.startswith(OWN_TO_A_RUN) and len(values) > 1:
            ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
            found.append(Setting(column.key, ordered, [-1 if c is None else ordered.index(c) for c in column.cells]))
    others = [setting for setting in found if setting.key.rpartition(".")[2] != SEED]
    return (others or found)[:MOST_SETTINGS]


def best_runs(table: RunsTable) -> list[str]:
    """The runs with the least final loss, and with the highest final accuracy."""
    names, lines = table.columns[0].cells, []
    for column in _without_diverged(table).columns:
        least = column.key.startswith("final loss")
        if column.group != "result" or not (least or column.key.startswith("final accuracy")):
            continue
        ended = [
            (float(cell), name) for cell, name in zip(column.cells, names, strict=True) if isinstance(cell, int | float)
        ]
        ended.sort(key=lambda pair: pair[0] if least else -pair[0])
        if ended:
            listed = ", ".join(f"{name} ({number(value)})" for value, name in ended[:BEST])
            lines.append(f"{'Lowest' if least else 'Highest'} {column.key}: {listed}.")
    return lines


def _without_diverged(table: RunsTable) -> RunsTable:
    """What was measured before a run diverged, often at its start alone, is not what it ended with."""
    ended = next(([cell != "diverged" for cell in c.cells] for c in table.columns if c.key == "verdict"), [])
    return replace(table, columns=[
        replace(c, cells=[cell if fine else None for cell, fine in zip(c.cells, ended, strict=True)])
        if c.group in ("result", "measure") and ended else c
        for c in table.columns
    ])  # fmt: skip


def _measures(table: RunsTable) -> list[Column]:
    """What the runs ended with, most wanted first."""
    columns = [c for c in table.columns if c.group in ("result", "measure") and any(map(_is_number, c.cells))]
    columns = [column for column in columns if column.key != "last step"]
    columns.sort(key=lambda column: (column.group != "result", not column.first))  # stable
    return columns[:MOST_MEASURES]


def _values(column: Column) -> Numbers:
    return np.array([float(cell) if _is_number(cell) else np.nan for cell in column.cells])  # type: ignore[arg-type]


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float)


def _axis(setting: Setting) -> Axis:
    return Axis(setting.key, log=setting.log)


def _points(setting: Setting, y: Numbers) -> list[Mark]:
    places = np.array(setting.places)
    known = (places >= 0) & np.isfinite(y)
    x = np.array([float(value) for value in setting.values])  # type: ignore[arg-type]
    means = _mean_by(places, len(x), y)
    drawn = np.isfinite(means)
    return [
        Line("runs", x[places[known]], y[known], None, Colour(0), mode="markers"),
        Line("mean", x[drawn], means[drawn], None, Colour(1), mode="lines+markers"),
    ]


def _heat(down: Setting, across: Setting, y: Numbers) -> Heat:
    rows, columns = np.array(down.places), np.array(across.places)
    width = len(across.values)
    cells = np.where((rows >= 0) & (columns >= 0), rows * width + columns, -1)
    z = _mean_by(cells, len(down.values) * width, y).reshape(len(down.values), width)
    return Heat("mean", z, down.labels, across.labels, None)


def _mean_by(places: np.ndarray, count: int, y: Numbers) -> Numbers:
    """The mean of the finite values at each place; NaN where there is none."""
    known = (places >= 0) & np.isfinite(y)
    total = np.bincount(places[known], weights=y[known], minlength=count)
    number_of = np.bincount(places[known], minlength=count)
    return np.where(number_of > 0, total / np.maximum(number_of, 1), np.nan)


def _pairs(settings: Sequence[Setting]) -> list[tuple[Setting, Setting]]:
    """All pairs; a single setting of words is drawn against itself, so that it is seen at all."""
    pairs = list(combinations(settings, 2))
    return pairs or [(setting, setting) for setting in settings if not setting.numeric]


def _left_out(table: RunsTable, settings: Sequence[Setting], measures: Sequence[Column]) -> list[str]:
    notes = []
    unfinished = sum(not _is_number(cell) for cell in measures[0].cells)
    if unfinished:
        runs = "1 run that diverged or has" if unfinished == 1 else f"{unfinished} runs that diverged or have"
        notes.append(f"{runs} no value of {measures[0].key}: not drawn there.")
    if len(settings) == MOST_SETTINGS:
        notes.append(f"Of more than {MOST_SETTINGS} settings the first {MOST_SETTINGS} are drawn; the table has all.")
    if len(measures) == MOST_MEASURES:
        notes.append(f"Of more than {MOST_MEASURES} measures the first {MOST_MEASURES} are drawn; the table has all.")
    return notes
