"""The few drawings that the panels share: lines over steps, by run or by layer, and frames over steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace

import numpy as np

from gramscope.report.figure import Axis, Colour, Control, Heat, Line, Mark, Numbers, Plot, layer_colours, spread
from gramscope.report.view import RunView, Series

Family = Mapping[str, Series]  # the series of a measure, by layer
STEP = Axis("optimiser step", steps=True)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MOST_FRAMES = 12
MOST_COLUMNS = 200
MANY = 24  # more lines than this cannot be told apart by colour, nor listed beside a figure
REFERENCE = Colour(7)  # grey
SAMPLED = 8  # of very many lines, in the legend


def label(views: Sequence[RunView], view: RunView, part: str = "") -> str:
    """What a legend says: the run where there are several, and the part where there is one."""
    if len(views) == 1:
        return part or view.name
    return f"{view.name} · {part}" if part else view.name


def mode(x: Numbers) -> str:
    """Points are shown where they are few, so that one can see when the run was looked at."""
    return "markers" if len(x) < 2 else ("lines+markers" if len(x) <= 40 else "lines")


def line(name: str, series: Series, run: int | None, colour: Colour, dash: str = "solid") -> Line:
    return Line(name, series.steps, series.values, run, colour, dash, mode(series.steps))  # type: ignore[arg-type]


def reference(name: str, value: float, steps: Sequence[Numbers], colour: Colour = REFERENCE) -> Line:
    """A dotted level over the steps of the series it is compared with."""
    ends = np.array([min(float(s.min()) for s in steps), max(float(s.max()) for s in steps)])
    return Line(name, ends, np.full(2, value), None, colour, "dot")


def thresholds(lazy: float, rich: float, steps: Sequence[Numbers], highest: float = math.inf) -> list[Mark]:
    """The two levels of the verdict as dotted lines; one far above all values would hide them and is left out."""
    levels = ((f"lazy below {lazy:g}", lazy, 0.9), (f"rich above {rich:g}", rich, 0.2))
    return [reference(name, level, steps, Colour(depth=depth)) for name, level, depth in levels if level <= 4 * highest]


def singles(views: Sequence[RunView], get: Callable[[RunView], Series | None]) -> list[dict[str, Series]]:
    """For each run its one series as a family without parts; an empty one where there is none."""
    return [{"": series} if (series := get(view)) is not None else {} for view in views]


def by_run(views: Sequence[RunView], parts: Iterable[Mapping[str, Series]]) -> list[Mark]:
    """One colour a run, one dash a part; ``parts`` gives for each run its series by part."""
    found = [dict(part) for part in parts]
    order = list(dict.fromkeys(name for part in found for name in part))
    marks: list[Mark] = []
    for view, part in zip(views, found, strict=True):
        for name, series in part.items():
            dash = DASHES[order.index(name) % len(DASHES)]
            marks.append(line(label(views, view, name), series, view.index, Colour(view.index), dash))
    return marks


def by_layer(view: RunView, family: Mapping[str, Series], colours: Mapping[str, Colour]) -> list[Mark]:
    return [line(name, series, view.index, colours[name]) for name, series in family.items()]


def colours_of(families: Iterable[Iterable[str]]) -> Mapping[str, Colour]:
    """The same colour for the same layer in all runs."""
    return layer_colours(list(dict.fromkeys(name for family in families for name in family)))


def many(family: Sized) -> bool:
    return len(family) > MANY


def layer_plots(
    views: Sequence[RunView],
    families: Sequence[Family],
    what: str,
    draw: Callable[[RunView, Family], tuple[Sequence[Mark], Axis]],
) -> list[Plot]:
    """A drawing for each run that has the measure: the marks and the axis that ``draw`` gives, colours of very many."""
    limits, plots = common_limits(filter(many, families)), list[Plot]()
    for view, family in zip(views, families, strict=True):
        title = caption(views, view, what)
        if many(family):
            plots.append(heat_over_steps(title, what, view, family, limits))
        elif family:
            marks, axis = draw(view, family)
            plots.append(Plot(title, STEP, axis, [marks], run=view.index))
    return plots


def mapped_note(views: Sequence[RunView], families: Sequence[Family]) -> list[str]:
    runs = [view.name for view, family in zip(views, families, strict=True) if many(family)]
    if not runs:
        return []
    return [
        f"{', '.join(runs)}: too many layers for lines, so colours are drawn, one row a layer; brighter is larger, "
        "up to the 98th percentile."
    ]


def few_in_legend(marks: Sequence[Mark]) -> list[Mark]:
    """Of very many lines only some, from the first to the last, are in the legend; pointing at one names it."""
    if not many(marks):
        return list(marks)
    kept = set(spread(len(marks), SAMPLED))
    return [
        replace(mark, legend=False) if isinstance(mark, Line) and place not in kept else mark
        for place, mark in enumerate(marks)
    ]


def table(family: Mapping[str, Series]) -> tuple[Numbers, Numbers]:
    """All series on the union of their steps: steps (k,) and values (layers, k), NaN where one is missing."""
    steps = np.unique(np.concatenate([series.steps for series in family.values()]))
    rows = np.full((len(family), len(steps)), np.nan)
    for place, series in enumerate(family.values()):
        rows[place, np.searchsorted(steps, series.steps)] = series.values
    return steps, rows


Limits = tuple[float | None, float | None]


def common_limits(families: Iterable[Mapping[str, Series]]) -> Limits:
    """One scale for the colours of all runs: a colour must mean the same number in each.

    It ends at the 98th percentile: one layer that leads must not darken all others.
    """
    values = [series.finite.values for family in families for series in family.values()]
    finite = np.concatenate(values) if values else np.zeros(0)
    return (float(finite.min()), float(np.percentile(finite, 98))) if len(finite) else (None, None)


def heat_over_steps(title: str, what: str, view: RunView, family: Family, limits: Limits) -> Plot:
    """A row for each layer, a column for each step; ``limits`` come from all runs that are drawn beside each other."""
    steps, rows = table(family)
    chosen = spread(len(steps), MOST_COLUMNS)
    columns = [f"{step:.0f}" for step in steps[chosen].tolist()]
    heat = Heat(what, rows[:, chosen], list(family), columns, view.index, *limits)
    height = int(np.clip(120 + 26 * len(family), 220, 900))
    return Plot(title, Axis("optimiser step"), Axis("layer"), [[heat]], run=view.index, height=height)


def logarithmic(marks: Sequence[Mark], span: float = 20.0) -> bool:
    """Whether the values are positive and span more than ``span``, so that a linear axis would hide the small ones."""
    lines = [mark.y[np.isfinite(mark.y)] for mark in marks if isinstance(mark, Line)]
    values = np.concatenate(lines) if lines else np.zeros(0)
    return bool(len(values) and values.min() > 0 and values.max() / span > values.min())


def whole_of(marks: Sequence[Mark]) -> tuple[float, float] | None:
    """The range (0, 1) for values that are shares by their nature and all zero, which would be drawn from -1 to 1."""
    flat = all(isinstance(mark, Line) and not mark.y[np.isfinite(mark.y)].any() for mark in marks)
    return unit_range(marks) if flat else None


def unit_range(marks: Sequence[Mark]) -> tuple[float, float] | None:
    """(0, 1) with a little air where all values lie within, as they should for a share; else free."""
    lines = [mark.y[np.isfinite(mark.y)] for mark in marks if isinstance(mark, Line)]
    values = np.concatenate(lines) if lines else np.zeros(0)
    return (-0.02, 1.02) if len(values) and values.min() >= -0.01 and values.max() <= 1.01 else None


def shown_steps(steps: Sequence[int], most: int = MOST_FRAMES) -> list[int]:
    return [steps[place] for place in spread(len(steps), most)]


def step_control(frames_by_run: Mapping[int, Sequence[int]], what: str) -> Control | None:
    """A slider over all steps that any run shows; it starts at the end."""
    union = sorted({step for steps in frames_by_run.values() for step in steps})
    if not union:
        return None
    return Control("slider", f"Step of {what}", [str(step) for step in union], len(union) - 1)


def frame_places(steps: Sequence[int], control: Control) -> list[int | None]:
    """For each position of the slider the frame that was true then: the last one at or before it."""
    found: list[int | None] = []
    for option in control.options:
        before = [place for place, step in enumerate(steps) if step <= int(option)]
        found.append(before[-1] if before else None)
    return found


def caption(views: Sequence[RunView], view: RunView, text: str) -> str:
    return f"{view.name}: {text}" if len(views) > 1 else text


def words_of(views: Sequence[RunView], say: Callable[[RunView], str]) -> list[str]:
    """What is said of each run, after its name; nothing where there is nothing to say."""
    return [f"{view.name}: {words[0].lower()}{words[1:]}" for view in views if (words := say(view))]


def number(value: float) -> str:
    """A number as one says it: three digits, and no exponent where none is needed.

    >>> number(0.12345), number(1234.5), number(2e-9)
    ('0.123', '1,234', '2e-09')
    """
    if value != value:
        return "not measured"
    size = abs(value)
    if size >= 1000 and size < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return (
        "not measured" if value != value else f"{100 * value:.0f} %" if abs(value) >= 0.095 else f"{100 * value:.2g} %"
    )


def thinning_note(views: Sequence[RunView], most: int) -> list[str]:
    """What the page leaves out of long series, said."""
    long = [view.name for view in views if max((len(s.steps) for s in view.series.values()), default=0) > most]
    if not long:
        return []
    return [f"Long series ({', '.join(long)}) are thinned for drawing; the run directory holds every value."]
