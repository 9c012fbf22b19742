"""What engineers look at first: gradients, updates and weights by layer, dead units, noise and sharpness."""

from collections.abc import Sequence

from gramscope.report.figure import Panel
from gramscope.report.panels.drawing import percent
from gramscope.report.panels.others import drawn_as_recorded
from gramscope.report.panels.validity import at_step
from gramscope.report.view import RunView

TITLE = "Gradients, updates and units"
MEASURES = ("gradient_norm", "update_ratio", "weight_norm", "dead_units", "noise_scale", "sharpness")


def panel(views: Sequence[RunView]) -> Panel | None:
    plots, notes = drawn_as_recorded(views, lambda name: name.partition("/")[0] in MEASURES)
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
