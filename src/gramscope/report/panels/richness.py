"""Dynamical richness, and the three curves that say where it comes from."""

from collections.abc import Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Line, Mark, Panel, Plot
from gramscope.report.panels.drawing import (
    STEP,
    by_run,
    caption,
    frame_places,
    shown_steps,
    step_control,
    unit_range,
)
from gramscope.report.panels.validity import change
from gramscope.report.view import RunView

TITLE = "Richness"
CURVES = ("quality", "utilisation", "intensity")


def panel(views: Sequence[RunView]) -> Panel | None:
    values = [{"": series} if (series := view.get("richness")) is not None else {} for view in views]
    dimensions = [
        {"": series} if (series := view.get("richness/effective_dimension")) is not None else {} for view in views
    ]
    similar = [
        {"": series} if (series := view.get("richness/initial_similarity")) is not None else {} for view in views
    ]
    frames = {view.index: _curve_frames(view) for view in views}
    if not any((*values, *dimensions, *similar, *frames.values())):
        return None
    plots: list[Plot] = []
    if any(values):
        marks = by_run(views, values)
        plots.append(
            Plot("Richness", STEP, Axis("D_LR (0 rich, 1 lazy)", range=unit_range(marks)), [marks], height=280)
        )
    if any(dimensions):
        plots.append(Plot("Effective dimension", STEP, Axis("dimensions"), [by_run(views, dimensions)], height=280))
    if any(similar):
        marks = by_run(views, similar)
        axis = Axis("CKA with the start (1 lazy)", range=unit_range(marks))
        plots.append(Plot("Similarity of the features to those at the start", STEP, axis, [marks], height=280))
    control = step_control({index: [step for step, _ in found] for index, found in frames.items()}, "the curves")
    for view in views:
        found = frames[view.index]
        if found and control is not None:
            places = frame_places([step for step, _ in found], control)
            plots.append(
                Plot(
                    caption(views, view, "quality, utilisation, intensity"),
                    Axis("number of eigenfunctions k", log=True),
                    Axis("share", range=(-0.02, 1.02)),
                    [marks for _, marks in found],
                    places,
                    run=view.index,
                )
            )
    words = [
        f"{view.name}: D_LR {change(view, found[''])}." for view, found in zip(views, values, strict=True) if found
    ]
    return Panel(
        "richness",
        TITLE,
        "D_LR near 0: the last features span nothing but the outputs (rich); curves that reach 1 within as many "
        "eigenfunctions as there are classes say the same, late ones mean lazy.",
        words,
        plots,
        control,
    )


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
