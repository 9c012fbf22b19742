"""A run as a figure: one drawing for each measure, its layers as lines."""

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure, load_pyplot
from gramscope.store.arrays import Array

Lines = dict[str, tuple[Array, Array]]  # by part: steps and values
COLUMNS = 3
SHOWN_IN_LEGEND = 8


def families(series: Mapping[str, tuple[Array, Array]], patterns: str | Sequence[str]) -> dict[str, Lines]:
    """Series (steps, values) by measure, then by part: ``share/0`` is the line ``0`` of ``share``."""
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


def _draw(axes: Axes, measure: str, lines: Lines) -> None:
    for part, (steps, values) in lines.items():
        axes.plot(steps, values, marker="." if len(steps) <= 40 else None, linewidth=1.2, label=part or measure)
    together = np.concatenate([values for _, values in lines.values()])
    finite = together[np.isfinite(together)]
    if len(finite) and finite.min() > 0 and finite.max() > 100 * finite.min():
        axes.set_yscale("log")
    axes.set(title=measure, xlabel="optimiser step")
    if 1 < len(lines) <= SHOWN_IN_LEGEND:
        axes.legend(frameon=False, fontsize="small")
