"""What first-order theory predicted of a step, and what the step did."""

from collections.abc import Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Line, Mark, Panel, Plot
from gramscope.report.panels.drawing import (
    STEP,
    by_run,
    caption,
    frame_places,
    label,
    line,
    percent,
    shown_steps,
    step_control,
)
from gramscope.report.panels.validity import sound
from gramscope.report.view import RunView

TITLE = "Predicted against true step"
PARTS = {
    "error": "whole error",
    "second_order": "second order",
    "mask_flips": "mask flips",
    "rounding": "rounding, at most",
}


def panel(views: Sequence[RunView]) -> Panel | None:
    changes: list[Mark] = []
    for view in views:
        for name, word, dash in (("predicted", "predicted", "dash"), ("true", "true", "solid")):
            series = view.get(f"step/{name}_loss_change")
            if series is not None:
                changes.append(line(label(views, view, word), series, view.index, Colour(view.index), dash))
    errors = [
        {word: s for name, word in PARTS.items() if (s := view.get(f"step/{name}")) is not None} for view in views
    ]
    frames = {view.index: _frames(view) for view in views}
    plots: list[Plot] = []
    if changes:
        plots.append(Plot("Change of the loss in one step", STEP, Axis("loss change"), [changes]))
    if any(errors):
        plots.append(
            Plot("What the prediction missed", STEP, Axis("fraction of the true change"), [by_run(views, errors)])
        )
    control = step_control({index: [step for step, _ in found] for index, found in frames.items()}, "the scatter")
    for view in views:
        found = frames[view.index]
        if found and control is not None:
            places = frame_places([step for step, _ in found], control)
            title = caption(views, view, "change of each output")
            plots.append(
                Plot(title, Axis("predicted"), Axis("true"), [m for _, m in found], places, run=view.index, height=360)
            )
    if not plots:
        return None
    return Panel(
        "steps",
        TITLE,
        "Where the two curves, or the points and the dashed diagonal, agree, the tangent kernel predicts the step; "
        "what it misses is curvature (second order), units that switched (mask flips), or rounding.",
        [words for view in views if (words := _words(view))],
        plots,
        control,
        _notes(views),
    )


def _notes(views: Sequence[RunView]) -> list[str]:
    """The reference of an error is what rounding alone may cause."""
    without = [view.name for view in views if "step/error" in view.series and "step/rounding" not in view.series]
    if not without:
        return []
    return [f"{', '.join(without)}: rounding was not recorded, so a small error may be rounding alone."]


def prediction_error(view: RunView) -> str:
    """The first-order error in words: of the outputs' change where that was recorded, else of the loss change."""
    error = view.series.get("step/error")
    if error is not None and len(error.finite.values):
        median = float(np.median(error.finite.values))
        rounding = view.series.get("step/rounding")
        small = rounding is not None and median <= float(np.median(rounding.finite.values))
        why = ", no more than rounding may add" if small else ""
        return f"median error of the first-order prediction of a step: {percent(median)}{why}"
    predicted, true = view.get("step/predicted_loss_change"), view.get("step/true_loss_change")
    if predicted is None or true is None:
        return ""
    _, left, right = np.intersect1d(predicted.steps, true.steps, return_indices=True)
    p, t = predicted.values[left], true.values[right]
    keep = np.isfinite(p) & np.isfinite(t)
    # Over all steps together: the ratio of one step means nothing where its loss hardly changed.
    whole = float(np.linalg.norm(t[keep]))
    if not whole:
        return ""
    missed = float(np.linalg.norm((p - t)[keep])) / whole
    return f"error of the predicted loss changes (root mean square): {percent(missed)}"


def _words(view: RunView) -> str:
    part = sound(view)
    before = "" if part is view else "before the run diverged, "
    words = prediction_error(part)
    return f"{view.name}: {before}{words}." if words else ""


def _frames(view: RunView) -> list[tuple[int, list[Mark]]]:
    both = sorted(set(view.arrays("step/predicted")) & set(view.arrays("step/true")))
    if not both:
        view.taken_arrays -= {"step/predicted", "step/true"}  # one without the other is shown as it is
        return []
    found: list[tuple[int, list[Mark]]] = []
    for step in shown_steps(both, 8):
        predicted, true = view.array("step/predicted", step), view.array("step/true", step)
        if predicted is None or true is None or predicted.size != true.size or not true.size:
            view.notes.append(f"step/predicted and step/true of step {step} do not pair, so they are not drawn.")
            continue
        x, y = predicted.ravel()[:1000], true.ravel()[:1000]
        finite = np.concatenate([x, y])
        finite = finite[np.isfinite(finite)]
        ends = np.array([finite.min(), finite.max()]) if len(finite) else np.zeros(2)
        diagonal = Line("equal", ends, ends, None, Colour(7), "dash", legend=False)
        points = Line("outputs", x, y, view.index, Colour(view.index), mode="markers", legend=False)
        found.append((step, [diagonal, points]))
    return found
