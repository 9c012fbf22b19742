"""The three pictures that results share: a heat map, lines, predicted against measured. Each returns a figure."""

from collections.abc import Mapping
from typing import Any

from gramscope.base.pyplot import Axes, Figure, figure_of, load_pyplot
from gramscope.base.results import as_column


def heat_map(matrix: Any, title: str, rows: str, columns: str, *, axes: Axes | None = None, **options: Any) -> Figure:
    """A matrix (a tensor or an array) as colours, with a bar."""
    axes = axes_or_new(axes, (5.0, 4.2))
    shown = axes.imshow(as_column(matrix), interpolation="nearest", **options)
    axes.set(title=title, xlabel=columns, ylabel=rows)
    axes.figure.colorbar(shown, ax=axes, shrink=0.85)
    return figure_of(axes)


def line_chart(
    x: Any, lines: Mapping[str, Any], title: str, label: str, *, axes: Axes | None = None, **scales: Any
) -> Figure:
    """Curves over common positions, by name; ``scales`` as for ``axes.set``."""
    axes = axes_or_new(axes, (5.2, 3.6))
    for name, y in lines.items():
        column = as_column(y)
        axes.plot(as_column(x)[: len(column)], column, marker=".", linewidth=1, label=name)
    axes.set(title=title, xlabel=label, **scales)
    if len(lines) > 1:
        axes.legend(fontsize="small")
    return figure_of(axes)


def agreement_chart(predicted: Any, measured: Any, title: str, *, axes: Axes | None = None) -> Figure:
    """Each entry predicted against the same entry measured, with the line on which they agree."""
    axes = axes_or_new(axes, (4.4, 4.2))
    x, y = as_column(predicted).reshape(-1), as_column(measured).reshape(-1)
    axes.plot(x, y, ".", markersize=3)
    ends = [min(x.min(), y.min()), max(x.max(), y.max())] if len(x) else [0.0, 1.0]
    axes.plot(ends, ends, "--", color="gray", linewidth=1)
    axes.set(title=title, xlabel="predicted", ylabel="measured")
    return figure_of(axes)


def axes_or_new(axes: Axes | None, size: tuple[float, float]) -> Axes:
    """The given axes, or those of a new figure."""
    return load_pyplot().subplots(figsize=size, layout="constrained")[1] if axes is None else axes
