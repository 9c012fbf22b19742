"""Whatever else a run holds: names that no panel knows are drawn as they are, never dropped."""

from collections.abc import Callable, Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Heat, Line, Mark, Panel, Plot, pooled
from gramscope.report.panels.drawing import (
    STEP,
    by_layer,
    by_run,
    caption,
    colours_of,
    common_limits,
    few_in_legend,
    frame_places,
    heat_over_steps,
    logarithmic,
    many,
    shown_steps,
    step_control,
    whole_of,
)
from gramscope.report.view import RunView, Series
from gramscope.store.names import FACTS, FINGERPRINT, SKIPPED

SCALARS = "Other measurements"
ARRAYS = "Other arrays"
CAPTIONS = {
    "gradient_norm": "Gradient norm", "update_ratio": "Update-to-weight ratio", "weight_norm": "Weight norm",
    "dead_units": "Dead units (share of a layer)", "noise_scale": "Gradient noise scale (examples)",
    "signal": "Size of the outputs of each layer", "saturated_units": "Saturated units (share of a layer)",
    "token_variance": "Variance between tokens of one example (share)", "feature_rank": "Feature rank of each layer",
    "class_predicted": "Share of the probe called so, by class", "class_recall": "Share named right, by class",
    "train_mode": "The probe in training mode", "collapse": "Neural collapse", "update_size": "Size of the last update",
    "gradient_given": "Size of the gradient that the optimiser was given",
    "gradient_zeros": "Zeros in the optimiser's gradient (share)", "effective_lr": "Effective learning rate",
    "gradient_overlap": "Cosine of two gradients in a row",
}  # fmt: skip
ALL = "all"  # the part of a measure that is of all layers together
HOW = (
    "Names for which this page has no panel of its own, drawn as recorded; what stands after the slash is a part. "
    "What each one tells: docs/watch.md."
)


def scalars(views: Sequence[RunView]) -> Panel | None:
    plots, notes = drawn_as_recorded(views, lambda name: name.partition("/")[0] not in (SKIPPED, *FACTS))
    if not plots:
        return None
    return Panel("others", SCALARS, HOW, [], plots, notes=notes)


def drawn_as_recorded(views: Sequence[RunView], wanted: Callable[[str], bool]) -> tuple[list[Plot], list[str]]:
    """A drawing for each measure among the names that no panel has shown, its parts as lines; and how to read them."""
    groups: dict[str, list[dict[str, Series]]] = {}
    for place, view in enumerate(views):
        for name in filter(wanted, view.untaken):
            prefix, _, part = name.partition("/")
            group = groups.setdefault(prefix, [{} for _ in views])
            series = view.get(name)
            if series is not None:
                group[place][part] = series
    for found in groups.values():
        for parts in found:
            if len(parts) > 1 and "" in parts:
                parts[ALL] = parts.pop("")
    plots, read = list[Plot](), dict[str, list[str]]()
    for prefix, found in groups.items():
        parts = {part or views[0].name: series for part, series in found[0].items()}
        if len(views) == 1 and many(parts):
            plots.append(
                heat_over_steps(
                    CAPTIONS.get(prefix, prefix) or "(no name)", prefix, views[0], parts, common_limits([parts])
                )
            )
            continue
        # Of one run the parts get colours, which tell more of them apart than dashes do.
        alone = len(views) == 1
        marks = few_in_legend(by_layer(views[0], parts, colours_of([parts])) if alone else by_run(views, found))
        axis = Axis(prefix, log=logarithmic(marks, 100.0), range=whole_of(marks))
        plots.append(Plot(CAPTIONS.get(prefix, prefix) or "(no name)", STEP, axis, [marks], height=280))
        how = next((text for view in views if (text := view.fact(prefix, "how_to_read"))), "")
        if how:
            read.setdefault(how, []).append(prefix)
    return plots, [f"{', '.join(prefixes)}: {how}" for how, prefixes in read.items()]


def arrays(views: Sequence[RunView]) -> Panel | None:
    chosen: dict[int, list[int]] = {}
    held = [(view, name) for view in views for name in view.untaken_arrays if not _housekeeping(name)]
    frames: list[tuple[RunView, str, list[int], list[list[Mark]]]] = []
    notes: list[str] = []
    for view, name in held:
        steps, marks = [], []
        for step in shown_steps(view.arrays(name), 8):
            drawn = _drawn(view, name, step, notes)
            if drawn:
                steps.append(step)
                marks.append(drawn)
        if marks:
            frames.append((view, name, steps, marks))
            chosen[view.index] = sorted({*chosen.get(view.index, []), *steps})
    control = step_control(chosen, "the arrays")
    if control is None and not notes:
        return None
    plots = []
    for view, name, steps, marks in frames:
        assert control is not None
        heat = isinstance(marks[0][0], Heat)
        x, y = (Axis("column"), Axis("row")) if heat else (Axis("entry"), Axis("value"))
        title = caption(views, view, name)
        plots.append(Plot(title, x, y, marks, frame_places(steps, control), run=view.index, height=320))
    return Panel("other-arrays", ARRAYS, HOW, [], plots, control, list(dict.fromkeys(notes)))


def _housekeeping(name: str) -> bool:
    """What a resumed run compares with, and by which it tells whether it may."""
    return name == FINGERPRINT or name.startswith("start/")


def _drawn(view: RunView, name: str, step: int, notes: list[str]) -> list[Mark]:
    value = view.array(name, step)
    if value is None or not value.size:
        notes.append(f"{view.name}: {name} cannot be drawn: it is empty, unreadable or not made of numbers.")
        return []
    if value.ndim <= 1:
        flat = value.reshape(-1)
        return [Line(name, np.arange(float(flat.size)), flat, view.index, Colour(view.index), legend=False)]
    if value.ndim > 2:
        notes.append(f"{view.name}: {name} of shape {value.shape} is drawn as a matrix of its last axis.")
        value = value.reshape(-1, value.shape[-1])
    drawn, block = pooled(value)
    if block > 1:
        notes.append(f"{view.name}: {name} is drawn as means over blocks of {block} × {block}.")
    rows, columns = ([str(place * block) for place in range(size)] for size in drawn.shape)
    return [Heat(name, drawn, rows, columns, view.index)]
