"""The figures as SVG files, drawn by matplotlib: no browser is needed, and any editor can open them."""

import re
import warnings
from collections.abc import Sequence
from html import escape
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gramscope.base.pyplot import Axes, load_pyplot
from gramscope.report.figure import Axis, Colour, Heat, Line, Mark, Numbers, Panel, Plot, spread

# Those of page.css in the light theme.
COLOURS = (
    "#0969b5", "#c2410c", "#157f5b", "#8a3ab9", "#a16207", "#c0266f", "#0e7490", "#57606a",
    "#d100d1", "#69001e", "#003c00", "#2d0f96", "#9d7fae", "#1a2cff", "#4b9a00", "#f0435f",
)  # fmt: skip
DEPTHS = np.array([[158, 188, 218], [75, 110, 190], [66, 10, 104]], dtype=np.float64) / 255
DASH: dict[str, Any] = {
    "solid": "-", "dash": (0, (4, 2.5)), "dot": (0, (1, 1.5)), "dashdot": (0, (4, 1.5, 1, 1.5)),
    "longdash": (0, (7, 3)),
}  # fmt: skip
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "gramscope", "path.simplify": False, "axes.grid": True,
    "grid.color": "#e3e7eb", "axes.axisbelow": True,
}  # fmt: skip
MOST = 1e150  # the largest numbers that an axis shows: of larger ones the ticks of a logarithmic axis overflow
MOST_LABELS = 32  # beside a heat map


def write_svgs(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """One file for each drawing, named after its panel: ``shares-1.svg``, ``shares-2.svg``, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        control = panel.control
        position = control.start if control else 0
        for place, plot in enumerate((*panel.still, *panel.moving)):
            if plot.frame(position) is None and not plot.empty:
                continue
            moves = control is not None and plot.at is not None
            where = f" ({control.label.lower()}: {control.options[position]})" if moves and control else ""
            path = folder / f"{re.sub('[^a-z0-9-]', '-', panel.key)}-{place + 1}.svg"
            path.write_text(drawn(plot, plot.frame(position) or (), where), encoding="utf-8")
            written.append(path)
    return written


def drawn(plot: Plot, marks: Sequence[Mark], where: str = "") -> str:
    """One drawing as an SVG document."""
    pyplot, written = load_pyplot(), StringIO()
    named = [mark for mark in marks if isinstance(mark, Line) and mark.legend]
    height = max(plot.height, 80 + 16 * len(named)) / 100
    with pyplot.style.context(["default", STYLE]), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that no font has, numbers that no axis can show
        figure = pyplot.Figure(figsize=(6.4 + 2 * (len(named) > 1), height), layout="constrained")
        axes = figure.subplots()
        heat = next((mark for mark in marks if isinstance(mark, Heat)), None)
        if heat is None:
            _draw_lines(axes, plot, [mark for mark in marks if isinstance(mark, Line)], len(named) > 1)
        else:
            _draw_heat(axes, heat, plot.square)
        axes.set_title(_text(plot.caption + where), loc="left", fontsize=11)
        axes.set(xlabel=_text(plot.x.title), ylabel=_text(plot.y.title))
        told = plot.empty if not marks else "" if any(map(_finite, marks)) else "No finite number to draw."
        axes.text(0.5, 0.5, _text(told), ha="center", transform=axes.transAxes)
        figure.savefig(written, format="svg", metadata={"Date": None})
    label = escape(_clean(plot.caption + where), quote=True)
    return written.getvalue().replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _finite(mark: Mark) -> bool:
    return bool(np.isfinite(mark.z if isinstance(mark, Heat) else mark.y).any())


def _draw_lines(axes: Axes, plot: Plot, lines: Sequence[Line], legend: bool) -> None:
    top: Numbers | float = 0.0
    drawn: list[Any] = []
    for mark in lines:
        x, y = (np.clip(values, -MOST, MOST) for values in mark.points())
        colour = _colour(mark.colour)
        if mark.stacked:
            drawn.append(axes.fill_between(x, top, top + y, color=colour, alpha=0.75, linewidth=0))
            top = top + y
            continue
        dots: dict[str, Any] = (
            {"marker": "o", "markersize": 2.5 if len(x) > 40 else 4} if "markers" in mark.mode else {}
        )
        style = DASH[mark.dash] if "lines" in mark.mode else "none"
        drawn += axes.plot(x, y, color=colour, linestyle=style, linewidth=1.6, **dots)
    _scale(axes, "x", plot.x, any((mark.x > 0).any() for mark in lines))
    _scale(axes, "y", plot.y, any((mark.y > 0).any() for mark in lines))
    if legend:
        shown = [(line, _short(mark.name)) for line, mark in zip(drawn, lines, strict=True) if mark.legend]
        axes.legend(*zip(*shown, strict=True), loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _scale(axes: Axes, name: str, axis: Axis, positive: bool) -> None:
    if axis.log and positive:
        axes.set(**{f"{name}scale": "log"})
    elif axis.steps or axis.whole:
        axes.locator_params(axis=name, integer=True)  # type: ignore[arg-type]
    if axis.range is not None:
        axes.set(**{f"{name}lim": axis.range})


def _draw_heat(axes: Axes, heat: Heat, square: bool) -> None:
    low, high = np.clip(heat.scale, -MOST, MOST)
    colours = load_pyplot().get_cmap("viridis").with_extremes(bad="#c8c8c8")
    z = np.clip(heat.z, -MOST, MOST)
    image = axes.imshow(z, cmap=colours, vmin=low, vmax=high, interpolation="none", aspect="auto")
    if square:
        axes.set_aspect("equal")
    axes.grid(visible=False)
    axes.set_xticks(*_labels(heat.columns, 10))
    axes.set_yticks(*_labels(heat.rows, MOST_LABELS))
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_ticks([low, high], labels=[f"{low:.3g}", f"{high:.3g}"])


def _labels(names: Sequence[str | float], most: int) -> tuple[list[float], list[str]]:
    """Neighbours of one name share a label in their middle; at most ``most`` labels."""
    places, texts, start = list[float](), list[str](), 0
    for name, same in groupby(names):
        length = len(list(same))
        places.append(start + (length - 1) / 2)
        texts.append(_short(str(name)))
        start += length
    kept = spread(len(places), most)
    return [places[place] for place in kept], [texts[place] for place in kept]


def _colour(colour: Colour) -> str | tuple[float, ...]:
    if colour.depth is None:
        return COLOURS[colour.place % len(COLOURS)]
    return tuple(np.interp(colour.depth, [0, 0.5, 1], channel) for channel in DEPTHS.T)


def _text(text: str) -> str:
    """As it is written: no formula, and no name that matplotlib hides."""
    shown = _clean(text).replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


def _short(name: str) -> str:
    return _text(name if len(name) <= 28 else f"{name[:14]}…{name[-12:]}")


def _clean(text: str) -> str:
    """Without what XML cannot hold at all: control characters and half surrogates."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "�", text)
