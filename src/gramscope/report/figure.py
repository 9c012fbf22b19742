"""What a panel is made of: marks on axes, in frames that a slider or a list steps through.

The model knows neither Plotly nor SVG. The page's script turns it into Plotly traces, :mod:`gramscope.report.svg` into
files; both read the same numbers.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gramscope.base.json_values import Json

Numbers = NDArray[np.float64]
MOST_POINTS = 1000  # of one line on the page; longer ones are thinned, and a note says so
MOST_CELLS = 160  # rows and columns of a drawn matrix
SMALLEST_SPAN = 1e-6  # of colours, relative to the numbers: below it a scale would show nothing but rounding


@dataclass(frozen=True)
class Colour:
    """A place in a palette: the ``place``-th distinct colour, or a ``depth`` in [0, 1] on the sequential scale."""

    place: int = 0
    depth: float | None = None

    def json(self) -> list[Json]:
        return ["d", round(self.depth, 4)] if self.depth is not None else ["c", self.place]


@dataclass(frozen=True, eq=False)
class Line:
    """Points (x, y), joined or not. ``run`` is the index of the run it belongs to, None for a reference line."""

    name: str
    x: Numbers
    y: Numbers
    run: int | None
    colour: Colour
    dash: Literal["solid", "dash", "dot", "dashdot", "longdash"] = "solid"
    mode: Literal["lines", "markers", "lines+markers"] = "lines"
    stacked: bool = False
    legend: bool = True

    def points(self, most: int = MOST_POINTS) -> tuple[Numbers, Numbers]:
        """The points to draw. Bands of a stack must keep the same steps, so they are thinned evenly."""
        if self.stacked:
            kept = spread(len(self.x), most)
            return self.x[kept], self.y[kept]
        return thinned(self.x, self.y, most)

    def json(self, most: int = MOST_POINTS) -> dict[str, Json]:
        x, y = self.points(most)
        return {"kind": "line", **vars(self), "x": numbers(x), "y": numbers(y), "colour": self.colour.json()}


@dataclass(frozen=True, eq=False)
class Heat:
    """A matrix of colours; rows are drawn from the top down, ``rows`` and ``columns`` say what they are.

    Colours go from ``low`` to ``high``, by default the least and the largest number.
    """

    name: str
    z: Numbers
    rows: Sequence[str | float]
    columns: Sequence[str | float]
    run: int | None
    low: float | None = None
    high: float | None = None
    unit: str = ""

    @property
    def scale(self) -> tuple[float, float]:
        """Where the colours begin and end; of numbers that are all one, from zero to them.

        >>> Heat("all but rounding", np.array([[1.0, 1.0 - 1e-15]]), ["a"], ["x", "y"], None).scale
        (0.0, 1.0)
        """
        finite = self.z[np.isfinite(self.z)]
        low = self.low if self.low is not None else float(finite.min()) if len(finite) else 0.0
        high = self.high if self.high is not None else float(finite.max()) if len(finite) else 1.0
        if high / 2 - low / 2 > SMALLEST_SPAN * max(abs(low), abs(high)):  # halved, so that it cannot overflow
            return low, high
        return (min(low, 0.0), max(high, 0.0)) if low or high else (0.0, 1.0)

    def json(self) -> dict[str, Json]:
        low, high = self.scale
        said = {"z": packed(self.z), "rows": list(self.rows), "columns": list(self.columns), "low": low, "high": high}
        return {"kind": "heat", **vars(self), **said}


Mark = Line | Heat


@dataclass(frozen=True)
class Axis:
    """An axis: its title, whether it is logarithmic, and a range if it is fixed."""

    title: str
    log: bool = False
    range: tuple[float, float] | None = None
    steps: bool = False  # training steps: the page can draw these on a logarithmic axis
    whole: bool = False  # whole numbers: nothing lies between two of them

    def json(self) -> dict[str, Json]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Plot:
    """One drawing. ``frames`` are alternatives; ``at[i]`` is the frame for position i of the panel's control, or None.

    Without ``at`` the drawing stands still and shows its only frame. ``run`` is set where the whole drawing belongs to
    one run, so that it is hidden with the run. ``empty`` is said where there is no frame; without it the drawing is
    hidden there.
    """

    caption: str
    x: Axis
    y: Axis
    frames: Sequence[Sequence[Mark]]
    at: Sequence[int | None] | None = None
    run: int | None = None
    square: bool = False
    height: int = 320
    empty: str = "Not recorded here."

    def frame(self, position: int) -> Sequence[Mark] | None:
        """What is drawn at a position of the control; None where nothing was recorded."""
        place = 0 if self.at is None else self.at[position]
        return None if place is None else self.frames[place]

    @staticmethod
    def _most(frame: Sequence[Mark]) -> int:
        """Points a line, fewer where there are very many lines, so that a page stays a page."""
        return max(50, min(MOST_POINTS, 100_000 // max(1, len(frame))))

    def json(self) -> dict[str, Json]:
        frames = [[_json(mark, self._most(frame)) for mark in frame] for frame in self.frames]
        at = None if self.at is None else list(self.at)
        return {**vars(self), "x": self.x.json(), "y": self.y.json(), "frames": frames, "at": at}


@dataclass(frozen=True)
class Control:
    """What steps through the frames of a panel: a slider (``kind="slider"``) or a list of names (``"select"``)."""

    kind: Literal["slider", "select"]
    label: str
    options: Sequence[str]
    start: int

    def json(self) -> dict[str, Json]:
        return {**vars(self), "options": list(self.options)}


@dataclass(frozen=True, eq=False)
class Panel:
    """A section of the page: drawings, one sentence on how to read them, and what they show in words."""

    key: str
    title: str
    how: str
    words: Sequence[str]
    plots: Sequence[Plot]
    control: Control | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def still(self) -> list[Plot]:
        return [plot for plot in self.plots if plot.at is None]

    @property
    def moving(self) -> list[Plot]:
        """The drawings that the control steps through; the page has them below it."""
        return [plot for plot in self.plots if plot.at is not None]

    def json(self) -> dict[str, Json]:
        return {
            "key": self.key,
            "title": self.title,
            "plots": [plot.json() for plot in (*self.still, *self.moving)],
            "control": self.control.json() if self.control else None,
        }


def _json(mark: Mark, most: int) -> dict[str, Json]:
    """``most`` is of the points of a line; a matrix is cut to ``MOST_CELLS`` where it is made."""
    return mark.json() if isinstance(mark, Heat) else mark.json(most)


def numbers(values: Numbers) -> list[int | float | None]:
    """For strict JSON: six digits are more than a screen shows, steps stay whole, what is not finite leaves a gap.

    >>> numbers(np.array([1234567.0, 0.123456789, np.nan]))
    [1234567, 0.123457, None]
    """
    return [rounded(value) if math.isfinite(value) else None for value in values.tolist()]


def rounded(value: float) -> int | float:
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")


def packed(values: Numbers) -> dict[str, Json]:
    """A matrix as base64 of little-endian float32: a third of its size as text, and NaN survives.

    In float64 where a number is too large for that, which would else pass for one that is not finite.
    """
    wide = bool((np.abs(values[np.isfinite(values)]) > np.finfo(np.float32).max).any())
    small = np.ascontiguousarray(values, dtype="<f8" if wide else "<f4")
    return {"shape": list(small.shape), "wide": wide, "base64": base64.b64encode(small.tobytes()).decode("ascii")}


def thinned(x: Numbers, y: Numbers, most: int = MOST_POINTS) -> tuple[Numbers, Numbers]:
    """At most about ``most`` points: of each stretch the lowest and the highest, with both ends, so spikes stay.

    >>> x = np.arange(10_000.0)
    >>> y = np.where(x == 5_001, 9.0, 0.0)
    >>> kept, values = thinned(x, y, most=100)
    >>> len(kept) <= 102, values.max(), kept[0], kept[-1]
    (True, np.float64(9.0), np.float64(0.0), np.float64(9999.0))
    """
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 2):
        finite = part[np.isfinite(y[part])]
        if len(finite) < len(part):  # a gap stays a gap
            kept.add(int(part[~np.isfinite(y[part])][0]))
        if len(finite):
            kept.update((int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])))
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def pooled(z: Numbers, most: int = MOST_CELLS) -> tuple[Numbers, int]:
    """A square matrix as means over equal blocks, at most ``most`` rows, and the size of the blocks.

    >>> small, block = pooled(np.ones((5, 5)), most=2)
    >>> small.shape, block
    ((2, 2), 3)
    """
    block = max(1, math.ceil(max(z.shape) / most))
    if block == 1:
        return z, 1
    starts = [np.arange(0, size, block) for size in z.shape]
    sums = np.add.reduceat(np.add.reduceat(z, starts[0], axis=0), starts[1], axis=1)
    counts = [np.diff(np.append(start, size)) for start, size in zip(starts, z.shape, strict=True)]
    return sums / np.outer(counts[0], counts[1]), block


def spread(count: int, most: int) -> list[int]:
    """``most`` of ``count`` places, evenly, with the first and the last.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    if count <= most:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, most).tolist()})


def layer_colours(layers: Sequence[str]) -> Mapping[str, Colour]:
    """Distinct colours for a few layers, a scale from first to last for many."""
    if len(layers) <= 8:
        return {layer: Colour(place) for place, layer in enumerate(layers)}
    return {layer: Colour(depth=place / (len(layers) - 1)) for place, layer in enumerate(layers)}
