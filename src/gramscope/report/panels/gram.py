"""The change of the weight Gram matrix against the change of the virtual covariance."""

from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Line, Mark, Panel, Plot
from gramscope.report.panels.drawing import (
    Family,
    by_layer,
    caption,
    colours_of,
    few_in_legend,
    layer_plots,
    many,
    mode,
    number,
    unit_range,
)
from gramscope.report.view import RunView

TITLE = "Gram matrix against virtual covariance"


def panel(views: Sequence[RunView]) -> Panel | None:
    grams = [view.family("delta_gram") for view in views]
    covariances = [view.family("delta_vc") for view in views]
    correlations = [view.family("gram_vc_correlation") for view in views]
    for view, gram, covariance in zip(views, grams, covariances, strict=True):
        # Half a pair is no point here; left untaken it is shown among the other measurements.
        view.taken -= {f"delta_gram/{layer}" for layer in gram.keys() - covariance.keys()}
        view.taken -= {f"delta_vc/{layer}" for layer in covariance.keys() - gram.keys()}
    colours = colours_of([*grams, *covariances, *correlations])
    plots: list[Plot] = []
    for view, gram, covariance in zip(views, grams, covariances, strict=True):
        marks = _pairs(view, gram, covariance, colours)
        if marks:
            plots.append(_against(views, view, marks))

    def draw(view: RunView, family: Family) -> tuple[Sequence[Mark], Axis]:
        lines = by_layer(view, family, colours)
        return lines, Axis("correlation", range=unit_range(lines))

    plots += layer_plots(views, correlations, "correlation of the two changes", draw)
    if not plots:
        return None
    return Panel(
        "gram",
        TITLE,
        "ΔGram is the change of WᵀW, ΔVC what the layer's inputs were asked to become: on the dashed diagonal both are "
        "of one size; the correlation says whether they also point the same way.",
        [_words(view, correlation) for view, correlation in zip(views, correlations, strict=True) if correlation],
        plots,
        notes=[
            f"{view.name}: of {len(gram)} layers some are in the legend; pointing at a point names its layer."
            for view, gram in zip(views, grams, strict=True)
            if many(gram)
        ],
    )


def _pairs(view: RunView, gram: Family, covariance: Family, colours: Mapping[str, Colour]) -> list[Mark]:
    marks: list[Mark] = []
    for layer, ours in gram.items():
        theirs = covariance.get(layer)
        if theirs is None:
            continue
        _, left, right = np.intersect1d(ours.steps, theirs.steps, return_indices=True)
        x, y = theirs.values[right], ours.values[left]
        marks.append(
            Line(layer, x, y, view.index, colours[layer], mode="markers" if mode(x) == "markers" else "lines+markers")
        )
    return marks


def _against(views: Sequence[RunView], view: RunView, marks: list[Mark]) -> Plot:
    lines = [mark for mark in marks if isinstance(mark, Line)]
    points = np.concatenate([np.concatenate([mark.x, mark.y]) for mark in lines])
    positive = points[np.isfinite(points) & (points > 0)]
    log = bool(len(positive)) and float(positive.max()) > 50 * float(positive.min()) and not (points < 0).any()
    low = float(positive.min()) if log else float(min(0.0, np.nanmin(points, initial=0.0)))
    # The diagonal ends where the shorter axis does, so that it does not squeeze the points.
    tops = [np.nanmax(np.concatenate([getattr(mark, axis) for mark in lines]), initial=low) for axis in ("x", "y")]
    high = max(float(min(tops)), low + 1e-12)
    ends = np.array([low, high])
    diagonal = Line("equal", ends, ends, None, Colour(7), "dash", legend=False)
    title = caption(views, view, "sizes of the two changes")
    return Plot(
        title,
        Axis("|ΔVC|", log=log),
        Axis("|ΔGram|", log=log),
        [[diagonal, *few_in_legend(marks)]],
        run=view.index,
        height=360,
    )


def _words(view: RunView, correlation: Family) -> str:
    ends = {name: series.last for name, series in correlation.items() if len(series.finite.values)}
    if not ends:
        return f"{view.name}: no correlation could be measured."
    low, high = min(ends, key=lambda name: ends[name]), max(ends, key=lambda name: ends[name])
    if number(ends[low]) == number(ends[high]):
        where = f"in layer {low}" if len(ends) == 1 else f"in all {len(ends)} layers"
        return f"{view.name}: the correlation at the end is {number(ends[low])} {where}."
    return (
        f"{view.name}: the correlation at the end lies between {number(ends[low])} (layer {low}) and "
        f"{number(ends[high])} (layer {high})."
    )
