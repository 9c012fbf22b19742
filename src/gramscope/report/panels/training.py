"""Loss and accuracy, and what belongs to the upkeep of the training: learning rate, norms, overhead."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from gramscope.diagnose.alerts import is_loss
from gramscope.report.figure import MOST_POINTS, Axis, Panel, Plot
from gramscope.report.panels.drawing import STEP, by_run, logarithmic, number, percent, thinning_note, unit_range
from gramscope.report.panels.validity import change
from gramscope.report.view import RunView, Series

TITLE = "Loss and accuracy"
UPKEEP = "Learning rate, parameter norm, overhead"
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "eval")  # as in "val/loss"
ACCURACY = re.compile(r"(?:^|[^a-z])acc(?:uracy)?(?:$|[^a-z])", re.IGNORECASE)
COSTLY = 0.2  # of the training: four times what the watcher keeps to by default
COST = (
    "the run is short, or it was measured without a time budget (overhead=None). By default gs.watch keeps to 5 % of "
    "the training time in longer runs (docs/watch.md)."
)


def panel(views: Sequence[RunView]) -> Panel | None:
    losses = [_named(view, "loss", is_loss) for view in views]
    accuracies = [_named(view, "accuracy", lambda name: bool(ACCURACY.search(name))) for view in views]
    plots: list[Plot] = []
    if any(losses):
        marks = by_run(views, losses)
        log = logarithmic(marks)
        plots.append(Plot("Loss", STEP, Axis("loss (log scale)" if log else "loss", log=log), [marks]))
    if any(accuracies):
        marks = by_run(views, accuracies)
        plots.append(Plot("Accuracy", STEP, Axis("accuracy", range=unit_range(marks)), [marks]))
    if not plots:
        return None
    return Panel(
        "training",
        TITLE,
        "A falling loss is learning; a gap that opens between train and test is overfitting.",
        [_words(view, loss, accuracy) for view, loss, accuracy in zip(views, losses, accuracies, strict=True)],
        plots,
        notes=thinning_note(views, MOST_POINTS),
    )


def _named(view: RunView, prefix: str, wanted: Callable[[str], bool]) -> dict[str, Series]:
    """The family of this name, and what the user logs under a name of his own: "val_loss", "loss_d", "val/loss"."""
    found = {name or "train": series for name, series in view.family(prefix, bare=True).items()}
    own = [name for name in view.untaken if wanted(name) and ("/" not in name or name.partition("/")[0] in SPLITS)]
    for name in own:
        series = view.get(name)
        if series is not None and not any(_same(series, other) for other in found.values()):
            found[name] = series
    return found


def _same(one: Series, other: Series) -> bool:
    """A Lightning module logs the loss that its callback logs too."""
    return np.array_equal(one.steps, other.steps) and np.array_equal(one.values, other.values, equal_nan=True)


def _words(view: RunView, losses: dict[str, Series], accuracies: dict[str, Series]) -> str:
    said = [f"{name if is_loss(name) else f'{name} loss'} {change(view, s)}" for name, s in losses.items()]
    said += [
        f"{name if ACCURACY.search(name) else f'{name} accuracy'} {change(view, s, percent)}"
        for name, s in accuracies.items()
    ]
    return f"{view.name}: {'; '.join(said)}." if said else f"{view.name}: neither loss nor accuracy recorded."


def _times(share: float) -> str:
    return f"{number(share)} times" if share > 2 else f"{percent(share)} of"


def upkeep(views: Sequence[RunView]) -> Panel | None:
    plots: list[Plot] = []
    for name, title in (
        ("lr", "learning rate"),
        ("norm/parameters", "norm of the parameters"),
        ("overhead", "overhead"),
    ):
        found = [{"": series} if (series := view.get(name)) is not None else {} for view in views]
        if any(found):
            marks = by_run(views, found)
            axis = Axis("watching / training" if name == "overhead" else title, log=logarithmic(marks, 50.0))
            plots.append(Plot(title.capitalize(), STEP, axis, [marks], height=240))
    if not plots:
        return None
    words = [
        f"{view.name}: watching took {_times(overhead.last)} the time that training itself took."
        for view in views
        if (overhead := view.get("overhead")) is not None
    ]
    how = "The overhead is the time that watching took as a fraction of the training's; the other curves are context."
    costly = [view.name for view in views if (s := view.get("overhead")) is not None and s.last > COSTLY]
    notes = [f"{', '.join(costly)}: {COST}"] if costly else []
    return Panel("upkeep", UPKEEP, how, words, plots, notes=notes)
