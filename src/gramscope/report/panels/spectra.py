"""Spectra of the weights over time, and the exponent of their tails beside what chance gives."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gramscope.report.figure import Axis, Colour, Control, Line, Mark, Numbers, Panel, Plot
from gramscope.report.panels.drawing import STEP, by_run, caption, number, shown_steps
from gramscope.report.view import RunView, Series, in_order

TITLE = "Spectra of the weights"
MOST_SPECTRA, MOST_RANKS = 6, 96


def panel(views: Sequence[RunView]) -> Panel | None:
    weights = _weights(views)
    exponents = {weight: [_exponents(view, weight) for view in views] for weight in weights}
    spectra = {view.index: {weight: _spectra(view, weight) for weight in weights} for view in views}
    plots: list[Plot] = []
    for view in views:
        held = {weight: marks for weight, marks in spectra[view.index].items() if marks}
        if held:
            order = list(held)
            plots.append(
                Plot(
                    caption(views, view, "eigenvalues of WᵀW, early (dim) to late (strong)"),
                    Axis("rank", log=True, whole=True),
                    Axis("eigenvalue", log=True),
                    [held[weight] for weight in order],
                    [order.index(weight) if weight in held else None for weight in weights],
                    run=view.index,
                    height=360,
                )
            )
    shown = [
        weight for weight in weights if any(_known(series) for run in exponents[weight] for series in run.values())
    ]
    if shown:
        plots.append(
            Plot(
                "Tail exponent α, and α of the shuffled weights (dashed)",
                STEP,
                Axis("α"),
                [by_run(views, exponents[weight]) for weight in shown],
                [shown.index(weight) if weight in shown else None for weight in weights],
                height=360,
                empty="α is not defined here; see below.",
            )
        )
    if not plots:
        return None
    return Panel(
        "spectra",
        TITLE,
        "Eigenvalues that rise out of the bulk are learnt directions; α says something only where it stays below its "
        "dashed null, α of the same entries in random order. Each null is one shuffle and scatters: gramscope analyze "
        "takes ten for its verdict.",
        _words(views, weights, exponents),
        plots,
        Control("select", "Weight", weights, 0),
        [*_undefined(views, weights, exponents), *_without_null(views, weights, exponents)],
    )


def _without_null(
    views: Sequence[RunView], weights: Sequence[str], exponents: dict[str, list[dict[str, Series]]]
) -> list[str]:
    """α without the α of the shuffled weight says nothing, so its absence is told."""
    said = []
    for place, view in enumerate(views):
        bare = [w for w in weights if "α" in exponents[w][place] and "null" not in exponents[w][place]]
        if bare:
            said.append(f"{view.name}: the null of α was not recorded for {', '.join(bare)}; their α cannot be judged.")
    return said


def _known(series: Series) -> bool:
    return len(series.finite.values) > 0


def _undefined(
    views: Sequence[RunView], weights: Sequence[str], exponents: dict[str, list[dict[str, Series]]]
) -> list[str]:
    """Weights whose exponent was asked for and is a number nowhere, with the reason if the run has kept one."""
    said = []
    for place, view in enumerate(views):
        names = [w for w in weights if "α" in exponents[w][place] and not _known(exponents[w][place]["α"])]
        if not names:
            continue
        told = [message for _, measure, message in view.failures if measure == "spectra"]
        why = told[0] if told else "a tail takes more eigenvalues than there are, or finite ones"
        said.append(f"{view.name}: α of {', '.join(names)} is not defined at any step: {why.rstrip('.')}.")
    return said


def _weights(views: Sequence[RunView]) -> list[str]:
    order = [name for view in views for name in view.layer_order]
    named: list[str] = []
    for view in views:
        named += view.array_family("spectrum") + list(view.family("alpha")) + list(view.family("alpha_null"))
    return in_order(dict.fromkeys(named), order)


def _exponents(view: RunView, weight: str) -> dict[str, Series]:
    found = {"α": view.get(f"alpha/{weight}"), "null": view.get(f"alpha_null/{weight}")}
    return {name: series for name, series in found.items() if series is not None}


def _spectra(view: RunView, weight: str) -> list[Mark]:
    steps = shown_steps(view.arrays(f"spectrum/{weight}"), MOST_SPECTRA)
    marks: list[Mark] = []
    for place, step in enumerate(steps):
        values = view.array(f"spectrum/{weight}", step)
        if values is None or not values.size:
            continue
        ranks, kept = _ranked(values.ravel())
        depth = place / max(1, len(steps) - 1)
        drawn = Line(f"step {step}", ranks, kept, view.index, Colour(depth=depth))
        points = int(np.isfinite(kept).sum())  # of one there is no line
        marks.append(drawn if points > 1 else replace(drawn, mode="markers"))
    return marks


def _ranked(values: Numbers) -> tuple[Numbers, Numbers]:
    """Eigenvalues from the largest down; of long spectra the ranks that a logarithmic axis can tell apart."""
    descending = np.sort(values[np.isfinite(values)])[::-1]
    ranks = np.arange(1, len(descending) + 1)
    if len(ranks) > MOST_RANKS:
        ranks = np.unique(np.geomspace(1, len(descending), MOST_RANKS).round().astype(int))
    kept = descending[ranks - 1]
    return ranks.astype(np.float64), np.where(kept > 0, kept, np.nan)  # a log axis has no place for zero


def _words(
    views: Sequence[RunView], weights: Sequence[str], exponents: dict[str, list[dict[str, Series]]]
) -> list[str]:
    said = []
    for place, view in enumerate(views):
        gaps = {}
        for weight in weights:
            both = exponents[weight][place]
            if "α" in both and "null" in both and len(both["α"].finite.values) and len(both["null"].finite.values):
                gaps[weight] = (both["α"].last, both["null"].last)
        if gaps:
            most = min(gaps, key=lambda weight: gaps[weight][0] - gaps[weight][1])
            alpha, null = gaps[most]
            said.append(
                f"{view.name}: α is furthest below that of the shuffled weight in {most}: {number(alpha)} against "
                f"{number(null)}."
                if alpha < null
                else f"{view.name}: no tail is heavier than that of its shuffled weight: α is nowhere below its null."
            )
    return said
