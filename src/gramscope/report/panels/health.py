"""What engineers look at first: gradients, updates and weights by layer, dead units, noise and sharpness."""

from collections.abc import Sequence

from gramscope.report.figure import Axis, Line, Mark, Panel, Plot
from gramscope.report.panels.drawing import REFERENCE, STEP, by_run, label, logarithmic, number, percent, singles
from gramscope.report.panels.others import drawn_as_recorded
from gramscope.report.panels.validity import at_step
from gramscope.report.view import RunView

TITLE = "Gradients, updates and units"
MEASURES = ("gradient_norm", "update_ratio", "weight_norm", "dead_units", "noise_scale")


def panel(views: Sequence[RunView]) -> Panel | None:
    plots, notes = drawn_as_recorded(views, lambda name: name.partition("/")[0] in MEASURES)
    plots += _sharpness(views, notes)
    if not plots:
        return None
    return Panel(
        "health",
        TITLE,
        "A layer whose gradient or update is far below that of the others hardly learns; one far above may explode. "
        "Dead units are zero on the whole probe and pass no gradient.",
        [words for view in views if (words := _words(view))],
        plots,
        notes=notes,
    )


def _words(view: RunView) -> str:
    """The layer with most dead units; nothing where none is dead."""
    dead = {name: series for name, series in view.family("dead_units").items() if len(series.finite.values)}
    most = max(dead, key=lambda name: dead[name].last, default=None)
    if most is None or dead[most].last == 0:
        return ""
    return f"{view.name}: layer {most} has most dead units, {percent(dead[most].last)} at {at_step(dead[most])}."


def _sharpness(views: Sequence[RunView], notes: list[str]) -> list[Plot]:
    """The sharpness below the value up to which gradient descent with this learning rate is stable."""
    found = singles(views, lambda view: view.get("sharpness"))
    if not any(found):
        return []
    marks = by_run(views, found) + [line for view in views if (line := _stable(views, view)) is not None]
    how = next((text for view in views if (text := view.fact("sharpness", "how_to_read"))), "")
    notes += [f"sharpness: {how}"] if how else []
    for view in views:
        error = view.get("sharpness/error")
        if error is not None and len(error.finite.values):
            most = number(float(error.finite.values.max()))
            notes.append(f"{view.name}: an eigenvalue lies within {most} of each sharpness drawn.")
    return [Plot("Sharpness", STEP, Axis("sharpness", log=logarithmic(marks)), [marks], height=280)]


def _stable(views: Sequence[RunView], view: RunView) -> Mark | None:
    """``2 (1 + β) / lr`` with momentum β; None for optimisers that scale each weight's step."""
    lr, momentum, adaptive = (view.series.get(f"optimizer/{name}") for name in ("lr", "momentum", "adaptive"))
    if "sharpness" not in view.series or lr is None or adaptive is None or adaptive.last or not (lr.values > 0).all():
        return None
    beta = 0.0 if momentum is None else momentum.last
    bound = 2 * (1 + beta) / lr.values
    return Line(label(views, view, "stable below"), lr.steps, bound, view.index, REFERENCE, "dot")
