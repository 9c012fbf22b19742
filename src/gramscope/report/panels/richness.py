"""Dynamical richness, and the three curves that say where it comes from."""

from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.diagnose.thresholds import LAZY_FEATURES, RICH_FEATURES
from gramscope.report.figure import Axis, Colour, Control, Line, Mark, Panel, Plot
from gramscope.report.panels.drawing import (
    STEP,
    by_run,
    caption,
    frame_places,
    number,
    reference,
    shown_steps,
    singles,
    step_control,
    thresholds,
    unit_range,
)
from gramscope.report.panels.validity import at_step, change
from gramscope.report.references import lazy_richness
from gramscope.report.view import RunView, Series

TITLE = "Richness"
HOW = (
    "Feature change near 0: the last hidden features are still those of the start (lazy). D_LR near 0: the last hidden "
    "features span the outputs and nothing else (rich); the curves then reach 1 within as many eigenfunctions as "
    "there are classes."
)
SIMILARITY = "richness/initial_similarity"
CURVES = ("quality", "utilisation", "intensity")


def feature_change(view: RunView) -> Series | None:
    """One minus the CKA of the last hidden features with those at the start: 0 where the features stand still.

    The watcher writes no similarity where it takes the features that the others are compared with; it is 1 there.
    """
    similar = view.get(SIMILARITY)
    if similar is None or not len(similar.finite.values):
        return None
    steps, values = similar.steps, 1 - similar.values
    taken = [float(step) for step in view.array_steps.get("start/features", ()) if step < steps[0]]
    whole = np.concatenate([[0.0][: len(taken)], values])
    return Series(np.concatenate([taken[:1], steps]), whole)


def panel(views: Sequence[RunView]) -> Panel | None:
    values, changes = singles(views, lambda view: view.get("richness")), singles(views, feature_change)
    dimensions = singles(views, lambda view: view.get("richness/effective_dimension"))
    frames = {view.index: _curve_frames(view) for view in views}
    if not any((*values, *dimensions, *changes, *frames.values())):
        return None
    plots: list[Plot] = []
    if any(changes):
        marks = by_run(views, changes)
        steps = [series.steps for found in changes for series in found.values()]
        marks += thresholds(LAZY_FEATURES, RICH_FEATURES, steps)
        axis = Axis("1 − CKA with the start", range=unit_range(marks))
        plots.append(Plot("Feature change since the start", STEP, axis, [marks], height=280))
    notes: list[str] = []
    if any(values):
        plots.append(_richness(views, values, notes))
    if any(dimensions):
        plots.append(Plot("Effective dimension", STEP, Axis("dimensions"), [by_run(views, dimensions)], height=280))
    control = step_control({index: [step for step, _ in found] for index, found in frames.items()}, "the curves")
    plots += _curves(views, frames, control)
    words = [
        f"{view.name}: {'; '.join(said)}."
        for view, found, moved in zip(views, values, changes, strict=True)
        if (said := _words(view, found.get(""), moved.get("")))
    ]
    return Panel("richness", TITLE, HOW, words, plots, control, notes)


def _words(view: RunView, richness: Series | None, features: Series | None) -> list[str]:
    said = [] if features is None else [f"feature change {number(features.last)} at {at_step(features)}"]
    if richness is not None:
        lazy = lazy_richness(view)
        beside = "" if lazy is None else f" (white features: {number(lazy)})"
        said.append(f"D_LR {change(view, richness)}{beside}")
    return said


def _richness(views: Sequence[RunView], values: Sequence[dict[str, Series]], notes: list[str]) -> Plot:
    """D_LR with the value of white features, 1 - √(C/p), as a dotted line; what lacks its sizes is named."""
    marks: list[Mark] = by_run(views, values)
    measured = [view for view, found in zip(views, values, strict=True) if found]
    lazy = {view.name: value for view in measured if (value := lazy_richness(view)) is not None}
    steps = [series.steps for found in values for series in found.values() if len(series.steps)]
    marks += [reference(f"white features {number(value)}", value, steps) for value in sorted(set(lazy.values()))]
    if lazy:
        notes.append(
            "Dotted: D_LR of p white features with an arbitrary readout to C outputs, 1 − √(C/p). Features of real "
            "data are not white, so a lazy network lies below this line; the verdict does not rest on D_LR."
        )
    missing = [view.name for view in measured if view.name not in lazy]
    if missing:
        notes.append(
            f"{', '.join(missing)}: the last layer's width is not recorded, so the line of white features is missing."
        )
    return Plot("Richness", STEP, Axis("D_LR (0 rich)", range=unit_range(marks)), [marks], height=280)


def _curves(
    views: Sequence[RunView], frames: Mapping[int, Sequence[tuple[int, list[Mark]]]], control: Control | None
) -> list[Plot]:
    plots = []
    for view in views:
        found = frames[view.index]
        if found and control is not None:
            places = frame_places([step for step, _ in found], control)
            title = caption(views, view, "quality, utilisation, intensity")
            x, y = Axis("number of eigenfunctions k", log=True), Axis("share", range=(-0.02, 1.02))
            plots.append(Plot(title, x, y, [marks for _, marks in found], places, run=view.index))
    return plots


def _curve_frames(view: RunView) -> list[tuple[int, list[Mark]]]:
    held = sorted({step for name in CURVES for step in view.arrays(f"richness/{name}")})
    found: list[tuple[int, list[Mark]]] = []
    for step in shown_steps(held, 24):
        marks: list[Mark] = []
        for place, name in enumerate(CURVES):
            curve = view.array(f"richness/{name}", step)
            if curve is not None and curve.ndim != 1:
                view.taken_arrays.discard(f"richness/{name}")  # no curve; shown among the other arrays
            elif curve is not None and len(curve):
                ks = np.arange(1.0, len(curve) + 1)
                marks.append(Line(name, ks, curve, view.index, Colour(place), ("solid", "dash", "dot")[place]))
        if marks:
            found.append((step, marks))
    return found
