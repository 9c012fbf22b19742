"""The tangent kernel: how far it has moved, how well it fits the targets, and the matrix itself."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gramscope.diagnose.thresholds import ENOUGH_READINGS, LAZY_KERNEL, RICH_KERNEL
from gramscope.report.figure import Axis, Heat, Line, Mark, Numbers, Panel, Plot, pooled
from gramscope.report.panels.drawing import (
    STEP,
    by_run,
    caption,
    frame_places,
    number,
    percent,
    shown_steps,
    singles,
    step_control,
    thresholds,
    unit_range,
)
from gramscope.report.panels.validity import at_step, change, retrained
from gramscope.report.view import RunView, Series

MOVES = "How the kernel moves"
MATRIX = "The kernel itself"
FAR = 8  # times the upper threshold: from there on a linear axis draws both thresholds as zero
MOST_NUMBERS = 1_500_000  # of all kernels on the page together: about 8 MB of text


def moved(view: RunView) -> Series | None:
    """How far the kernel is from its start, 0 where it stands still: ``|K - K₀| / |K₀|``."""
    series = view.get("kernel/drift")
    return None if series is None or not len(series.finite.values) else series


def largest(drift: Series) -> tuple[float, float]:
    """Step and value of the largest drift: with large steps a kernel grows first and then shrinks again."""
    known = drift.finite
    place = int(known.values.argmax())
    return float(known.steps[place]), float(known.values[place])


def moves(views: Sequence[RunView]) -> Panel | None:
    drifts, targets = singles(views, moved), singles(views, lambda view: view.get("kernel/alignment"))
    ranks = singles(views, lambda view: view.get("kernel/participation_ratio"))
    if not any((*drifts, *targets, *ranks)):
        return None
    plots: list[Plot] = []
    for found, title, axis in (
        (drifts, "Drift from the kernel at the start", "|K − K₀| / |K₀|"),
        (targets, "Alignment with the targets", "alignment with the targets"),
        (ranks, "Participation ratio of the kernel", "tr(K)² / tr(K²)"),
    ):
        if any(found):
            marks = by_run(views, found)
            log = False
            if found is drifts:
                known = [series.finite for each in drifts for series in each.values()]
                highest = max(float(series.values.max()) for series in known)
                log = highest > FAR * RICH_KERNEL
                marks = _above_zero(marks) if log else marks
                marks += thresholds(LAZY_KERNEL, RICH_KERNEL, [series.steps for series in known], highest)
            bounds = unit_range(marks) if found is targets else None
            plots.append(
                Plot(
                    title,
                    STEP,
                    Axis(f"{axis} (log scale)" if log else axis, log=log, range=bounds),
                    [marks],
                    height=280,
                )
            )
    notes = [
        f"{view.name}: {switch}, so the drift from there on compares kernels of different parameters."
        for view in views
        if (switch := retrained(view)) is not None
    ]
    notes += [
        f"{view.name}: the kernel is estimated from random mixtures of very many outputs; its standard error is "
        f"{percent(error.last)} of |K| at {at_step(error)}."
        for view in views
        if (error := view.get("kernel/standard_error")) is not None and len(error.finite.values)
    ]
    words = [
        _words(view, drift.get(""), target.get("")) for view, drift, target in zip(views, drifts, targets, strict=True)
    ]
    return Panel(
        "kernel-moves",
        MOVES,
        f"A run whose largest drift is below {LAZY_KERNEL} is lazy, above {RICH_KERNEL} rich, unless its features "
        "stand still; an alignment with the targets that rises means that the kernel turned towards the task.",
        words,
        plots,
        notes=notes,
    )


def _above_zero(marks: Sequence[Mark]) -> list[Mark]:
    """Without the zero of the start, which a logarithmic axis has no place for."""
    return [replace(mark, y=np.where(mark.y > 0, mark.y, np.nan)) if isinstance(mark, Line) else mark for mark in marks]


def _words(view: RunView, drift: Series | None, target: Series | None) -> str:
    said = []
    if drift is not None:
        step, most = largest(drift)
        beside = f" (largest {number(most)} at step {step:,.0f})" if number(most) != number(drift.last) else ""
        said.append(f"kernel drift {number(drift.last)} at step {drift.finite.steps[-1]:,.0f}{beside}")
    if target is not None:
        said.append(f"alignment with the targets {change(view, target)}")
    return f"{view.name}: {'; '.join(said)}." if said else f"{view.name}: no kernel recorded."


def matrix(views: Sequence[RunView]) -> Panel | None:
    holding = [view for view in views if len(view.arrays("kernel"))]
    if not holding:
        return None
    notes: list[str] = []
    frames: dict[int, list[Heat]] = {}
    chosen: dict[int, list[int]] = {}
    by_class: dict[int, bool] = {}  # whether all kernels of a run could be sorted
    for view in holding:
        found = _frames(view, MOST_NUMBERS // len(holding), notes)
        frames[view.index], chosen[view.index], by_class[view.index] = found
    control = step_control(chosen, "the kernel")
    if control is None:
        return None
    plots = [
        Plot(
            caption(views, view, "kernel of the probe examples"),
            _example_axis(by_class[view.index]),
            _example_axis(by_class[view.index]),
            [[heat] for heat in frames[view.index]],
            frame_places(chosen[view.index], control),
            run=view.index,
            square=True,
            height=460,
        )
        for view in holding
        if frames[view.index]
    ]
    notes.append("Colours are cut at the 1st and 99th percentile of each step; pointing at a cell shows its value.")
    return Panel(
        "kernel",
        MATRIX,
        _how([by_class[view.index] for view in holding if frames[view.index]]),
        [_block_words(view, frames[view.index], chosen[view.index]) for view in holding if frames[view.index]],
        plots,
        control,
        list(dict.fromkeys(notes)),
    )


def _example_axis(by_class: bool) -> Axis:
    return Axis("example, by class" if by_class else "example, in its own order")


def _how(by_class: Sequence[bool]) -> str:
    blocks = "bright blocks along the diagonal mean that the network treats a class as one."
    if all(by_class):
        return f"Examples are sorted by class: {blocks}"
    pairs = "A bright cell is a pair of examples of which learning the one also moves the other."
    return f"{pairs} Where examples are sorted by class, {blocks}" if any(by_class) else pairs


def _frames(view: RunView, budget: int, notes: list[str]) -> tuple[list[Heat], list[int], bool]:
    steps = list(view.arrays("kernel"))
    view.arrays("kernel/labels")
    first = next((k for step in steps if (k := view.array("kernel", step)) is not None and k.ndim == 2), None)
    if first is None:
        view.taken_arrays -= {"kernel", "kernel/labels"}  # whatever it is, it is shown among the other arrays
        return [], [], False
    size = max(1, pooled(first)[0].size)
    wanted = shown_steps(steps, int(np.clip(budget // size, 2, 12)))
    if len(wanted) < len(steps):
        notes.append(f"{view.name}: {len(wanted)} of {len(steps):,} recorded kernels are on the page.")
    found: list[Heat] = []
    kept: list[int] = []
    by_class = True
    for step in wanted:
        kernel = view.array("kernel", step)
        if kernel is None or kernel.ndim != 2 or not kernel.size:
            continue
        labels = view.array("kernel/labels", step)
        found.append(_heat(view, kernel, labels, notes))
        by_class = by_class and _labels_fit(kernel, labels)
        kept.append(step)
    return found, kept, by_class


def _labels_fit(kernel: Numbers, labels: Numbers | None) -> bool:
    return labels is not None and labels.ndim == 1 and kernel.shape == (len(labels), len(labels))


def _heat(view: RunView, kernel: Numbers, labels: Numbers | None, notes: list[str]) -> Heat:
    names: list[str] | None = None
    if labels is not None and _labels_fit(kernel, labels):
        order = np.argsort(labels, kind="stable")
        kernel, names = kernel[np.ix_(order, order)], [f"{value:g}" for value in labels[order].tolist()]
    drawn, block = pooled(kernel)
    if block > 1:
        notes.append(
            f"{view.name}: the kernel of {kernel.shape[0]} examples is drawn as means over blocks of {block} × {block}."
        )
    if names is None:
        names = [str(place) for place in range(max(kernel.shape))]
        notes.append(f"{view.name}: no labels beside the kernel, so examples are in their own order.")
    rows, columns = names[: kernel.shape[0] : block], names[: kernel.shape[1] : block]
    finite = drawn[np.isfinite(drawn)]
    low, high = (float(v) for v in np.percentile(finite, [1, 99])) if len(finite) else (0.0, 1.0)
    return Heat("kernel", drawn, rows, columns, view.index, low, high)


def _block_words(view: RunView, heats: Sequence[Heat], steps: Sequence[int]) -> str:
    """The mean within classes and the mean between them, at the first and the last step shown."""
    means = {steps[-1]: _contrast(heats[-1])}
    if len(steps) >= ENOUGH_READINGS and steps[0] <= view.start:
        means = {steps[0]: _contrast(heats[0]), **means}
    said = [
        f"{number(mean[0])} at step {step:,} (between classes {number(mean[1])})"
        for step, mean in means.items()
        if mean is not None
    ]
    if not said:
        return f"{view.name}: kernels of {len(steps)} steps."
    return f"{view.name}: within classes, apart from the diagonal, the kernel's mean is {' and '.join(said)}."


def _contrast(heat: Heat) -> tuple[float, float] | None:
    names = np.array([str(name) for name in heat.rows])
    same = names[:, None] == np.array([str(name) for name in heat.columns])[None, :]
    if heat.z.shape[0] != heat.z.shape[1]:
        return None
    known = np.isfinite(heat.z)
    within, between = known & same & ~np.eye(len(names), dtype=bool), known & ~same
    return (float(heat.z[within].mean()), float(heat.z[between].mean())) if within.any() and between.any() else None
