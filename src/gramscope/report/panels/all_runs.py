"""Many runs at once: one measure at a time, all runs in one drawing; the page repeats it small, one drawing a run."""

from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Control, Line, Mark, Panel, Plot
from gramscope.report.panels.drawing import STEP, logarithmic, mode
from gramscope.report.view import RunView, in_order
from gramscope.store.names import SKIPPED

TITLE = "All runs"
HOW = "One measure of all runs: first together, then each run in a small drawing, on the same axes."
MOST_POINTS = 400_000  # of all lines of all measures
# Verdicts by colour, here and in the table.
COLOURS = {"rich": 1, "in between": 4, "lazy": 0, "diverged": 5, "too short": 7, "unknown": 7}
FIRST = ("loss/probe", "loss")


def panel(views: Sequence[RunView], regimes: Mapping[int, str]) -> Panel | None:
    """``regimes`` gives the verdict by the index of the run."""
    order = [name for view in views for name in view.layer_order]
    names = in_order(dict.fromkeys(name for view in views for name in view.series if name != SKIPPED), order)
    if not names:
        return None
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))  # stable
    most = int(np.clip(MOST_POINTS // max(1, sum(len(view.series) for view in views)), 16, 400))
    frames = [_frame(views, name, regimes, most) for name in names]
    log = [logarithmic(frame, 100.0) for frame in frames]
    plots = [
        Plot(
            "All runs, coloured by their verdict",
            STEP,
            Axis("value (log scale)" if scale else "value", log=scale),
            _only(frames, log, scale),
            _places(log, scale),
            height=380,
            empty="",
        )
        for scale in (False, True)
        if scale in log
    ]
    return Panel("all-runs", TITLE, HOW, [], plots, Control("select", "Measure", names, 0))


def _frame(views: Sequence[RunView], name: str, regimes: Mapping[int, str], most: int) -> list[Mark]:
    marks: list[Mark] = []
    for view in views:
        series = view.get(name)
        if series is not None and len(series.steps):
            colour = Colour(COLOURS[regimes[view.index]])
            whole = Line(view.name, series.steps, series.values, view.index, colour)
            x, y = whole.points(most)
            drawn = "markers" if mode(x) == "markers" else "lines"
            marks.append(Line(view.name, x, y, view.index, colour, mode=drawn, legend=False))  # type: ignore[arg-type]
    return marks


def _only(frames: Sequence[list[Mark]], log: Sequence[bool], scale: bool) -> list[list[Mark]]:
    return [frame for frame, own in zip(frames, log, strict=True) if own is scale]


def _places(log: Sequence[bool], scale: bool) -> list[int | None]:
    count = iter(range(len(log)))
    return [next(count) if own is scale else None for own in log]
