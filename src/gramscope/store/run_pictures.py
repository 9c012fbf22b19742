"""A run as a figure: one drawing for each measure, its layers as lines."""

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure, load_pyplot
from gramscope.store.arrays import Array
from gramscope.store.names import FACTS, SKIPPED

Lines = dict[str, tuple[Array, Array]]  # by part: steps and values
COLUMNS = 3
SHOWN_IN_LEGEND = 8


def families(series: Mapping[str, tuple[Array, Array]], patterns: str | Sequence[str]) -> dict[str, Lines]:
    """Series (steps, values) by measure, then by part: ``share/0`` is the line ``0`` of ``share``.

    "*" leaves out facts of the set-up, which are points or flat lines; by their names they are drawn too.
    """
    if patterns == "*":
        curves = {name: lines for name, lines in series.items() if name.partition("/")[0] not in (SKIPPED, *FACTS)}
        series = curves or series
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    chosen = [name for name in series if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]
    if not chosen:
        raise InputError(
            f"names must match some of what the run holds, got {patterns!r}. It holds {', '.join(series) or 'nothing'}."
        )
    found: dict[str, Lines] = {}
    for name in chosen:
        measure, _, part = name.partition("/")
        found.setdefault(measure, {})[part] = series[name]
    return found


def picture_of_run(name: str, series: Mapping[str, tuple[Array, Array]], patterns: str | Sequence[str]) -> Figure:
    """A matplotlib figure with one axes for each measure."""
    found = families(series, patterns)
    columns = min(COLUMNS, len(found))
    rows = -(-len(found) // columns)
    figure, axes = load_pyplot().subplots(
        rows, columns, figsize=(4.2 * columns, 2.8 * rows), layout="constrained", squeeze=False
    )
    for place, (measure, lines) in enumerate(found.items()):
        _draw(axes.flat[place], measure, lines)
    for spare in axes.flat[len(found) :]:
        spare.set_axis_off()
    figure.suptitle(name)
    return figure


def _crowded(steps: Array) -> bool:
    """Whether most measurements came early, as a logarithmic schedule has it."""
    return len(steps) > 4 and bool(steps[0] >= 0 and steps[len(steps) // 2] < 0.15 * steps[-1])


def _draw(axes: Axes, measure: str, lines: Lines) -> None:
    for part, (steps, values) in lines.items():
        axes.plot(steps, values, marker="." if len(steps) <= 40 else None, linewidth=1.2, label=part or measure)
    together = np.concatenate([values for _, values in lines.values()])
    finite = together[np.isfinite(together)]
    if len(finite) and finite.min() > 0 and finite.max() > 100 * finite.min():
        axes.set_yscale("log")
    if any(_crowded(steps) for steps, _ in lines.values()):
        axes.set_xscale("symlog", linthresh=1)  # logarithmic, with a place for step 0
        axes.set_xlim(-0.2, 1.3 * max(float(steps[-1]) for steps, _ in lines.values()))
    axes.set(title=measure, xlabel="optimiser step")
    if 1 < len(lines) <= SHOWN_IN_LEGEND:
        axes.legend(frameon=False, fontsize="small")
