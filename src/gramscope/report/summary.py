"""The run in plain words: lazy or rich, which layer learns, what changed when, and what went wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gramscope.report.panels.drawing import number, percent
from gramscope.report.panels.kernels import moved, written_as_alignment
from gramscope.report.panels.steps import missed
from gramscope.report.view import RunView, Series

LAZY, RICH = 0.5, 1.0  # of |K - K₀| / |K₀|: below a half stands still, from its own size on has moved
LAZY_ALIGNED, RICH_ALIGNED = 0.1, 0.3  # of 1 - alignment with the start, where that was recorded instead
RICH_FEATURES, LAZY_FEATURES = 0.2, 0.5  # of D_LR
IDLE = 0.02  # a layer with a smaller share does not learn
RULE = (
    f"lazy or rich is judged by how far the kernel moved, as a fraction of its size at the start (below {LAZY} lazy, "
    f"above {RICH} rich; of one minus the alignment {LAZY_ALIGNED} and {RICH_ALIGNED}); without a kernel by D_LR "
    f"(above {LAZY_FEATURES} lazy, below {RICH_FEATURES} rich)"
)


@dataclass(frozen=True)
class Words:
    """What the page says of one run: a verdict in one sentence, then findings, then warnings."""

    name: str
    index: int
    verdict: str
    findings: Sequence[str]
    warnings: Sequence[str]


def in_words(view: RunView) -> Words:
    """The findings of one run, each with the number it rests on."""
    if not len(view.steps):
        return Words(view.name, view.index, "No step has been committed yet.", (), tuple(_troubles(view)))
    found = [*_outcome(view), *_layers(view), *_moments(view), *_features(view), *_prediction(view)]
    return Words(view.name, view.index, _verdict(view), tuple(found), tuple(_troubles(view)))


def compared(views: Sequence[RunView]) -> list[str]:
    """What several runs say beside each other."""
    said = []
    drifts = {view.name: series.last for view in views if (series := moved(view)) is not None}
    if len(drifts) > 1:
        most, least = max(drifts, key=lambda name: drifts[name]), min(drifts, key=lambda name: drifts[name])
        said.append(
            f"The kernel of {most} moved most ({number(drifts[most])}), of {least} least ({number(drifts[least])})."
        )
    for name, word in (("accuracy/test", "test accuracy"), ("accuracy", "accuracy"), ("loss", "loss")):
        ends = {view.name: view.series[name].last for view in views if name in view.series}
        ends = {run: value for run, value in ends.items() if not math.isnan(value)}
        if len(ends) > 1:
            high, low = max(ends, key=lambda run: ends[run]), min(ends, key=lambda run: ends[run])
            say = number if name == "loss" else percent
            said.append(
                f"The {word} ends highest in {high} ({say(ends[high])}) and lowest in {low} ({say(ends[low])})."
            )
            break
    return said


def regime(view: RunView) -> str:
    """``"lazy"``, ``"rich"``, ``"in between"`` or ``"unknown"``, by the rule that the page states."""
    drift, richness = moved(view), view.series.get("richness")
    if drift is not None and len(drift.finite.values) > 1:
        lazy, rich = (LAZY_ALIGNED, RICH_ALIGNED) if _aligned(view) else (LAZY, RICH)
        return "lazy" if drift.last < lazy else "rich" if drift.last > rich else "in between"
    if richness is not None and not math.isnan(richness.last):
        value = richness.last
        return "lazy" if value > LAZY_FEATURES else "rich" if value < RICH_FEATURES else "in between"
    return "unknown"


def _aligned(view: RunView) -> bool:
    return written_as_alignment(view.series["kernel/drift"])


def _verdict(view: RunView) -> str:
    kind, drift, richness = regime(view), moved(view), view.series.get("richness")
    grounds = []
    if drift is not None:
        grounds.append(f"kernel drift {number(drift.last)}")
    if richness is not None and not math.isnan(richness.last):
        grounds.append(f"D_LR {number(richness.last)}")
    because = f" ({', '.join(grounds)})" if grounds else ""
    return {
        "lazy": f"The run is lazy: its features hardly moved{because}.",
        "rich": f"The run is rich: it changed its features{because}.",
        "in between": f"The run lies between lazy and rich{because}.",
        "unknown": "Neither a second kernel nor richness was recorded, so lazy or rich cannot be told yet.",
    }[kind]


# The batch's own loss where it was logged, else that of the probe.
LOSSES, ACCURACIES = ("loss", "loss/probe"), ("accuracy", "accuracy/probe")


def _first_of(view: RunView, names: Sequence[str]) -> Series | None:
    found = (view.series[name] for name in names if name in view.series)
    return next((series for series in found if len(series.finite.values)), None)


def _outcome(view: RunView) -> list[str]:
    said = []
    for names, word, say in (
        (LOSSES, "Loss", number),
        (ACCURACIES, "Accuracy", percent),
        (("accuracy/test",), "Test accuracy", percent),
    ):
        series = _first_of(view, names)
        if series is not None:
            said.append(f"{word} {say(series.first)} → {say(series.last)}")
    span = f"over {len(view.steps)} records up to step {view.steps[-1]:,}"
    return [f"{'; '.join(said)} {span}."] if said else [f"Watched {span}."]


def _layers(view: RunView) -> list[str]:
    family = {name: s.finite for name, s in view.family("share").items() if len(s.finite.values)}
    if not family:
        return []
    first, last = _leader(family, 0), _leader(family, -1)
    share_first, share_last = percent(family[first].first), percent(family[last].last)
    if first == last:
        said = [
            f"Layer {first} learns most, at first ({share_first} of the loss decrease) and at the end ({share_last})."
        ]
    else:
        said = [
            f"At first layer {first} learns most ({share_first} of the loss decrease), at the end layer {last} "
            f"({share_last})."
        ]
    quiet = min(IDLE, 0.2 / len(family))  # of many layers each has little
    idle = [name for name, s in family.items() if float(np.abs(s.values).max()) < quiet]
    if idle:
        said.append(f"{_listed(idle)} never had {percent(quiet)} of the learning.")
    stopped = {
        name: step for name, s in family.items() if name not in idle and (step := _stopped(s, quiet)) is not None
    }
    if len(stopped) > 4:
        early, late = min(stopped, key=lambda name: stopped[name]), max(stopped, key=lambda name: stopped[name])
        said.append(
            f"{len(stopped)} layers stopped learning (their shares then stay below {percent(quiet)}): first {early} at "
            f"step {stopped[early]:,.0f}, last {late} at step {stopped[late]:,.0f}."
        )
    else:
        said += [
            f"Layer {name} stopped learning at step {step:,.0f}: its share then stays below {percent(quiet)}."
            for name, step in stopped.items()
        ]
    return said


def _leader(family: Mapping[str, Series], place: int) -> str:
    return max(family, key=lambda name: float(family[name].values[place]))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"Layer {shown}" if len(names) == 1 else f"Layers {shown}"


def _stopped(series: Series, quiet: float) -> float | None:
    """The step from which the share stays idle: at least three records and a fifth of the run."""
    busy = np.flatnonzero(np.abs(series.values) >= quiet)
    if not len(busy) or len(series.values) - busy[-1] - 1 < max(3, len(series.values) // 5):
        return None
    return float(series.steps[busy[-1] + 1])


def _moments(view: RunView) -> list[str]:
    said = []
    drift = moved(view)
    if drift is not None and regime(view) != "lazy" and len(drift.finite.values) > 2:
        said.append(
            f"Half of the kernel's movement was done by step {_reached(drift, 0.5):,.0f}, "
            f"nine tenths by step {_reached(drift, 0.9):,.0f}."
        )
    loss = _first_of(view, LOSSES)
    if loss is not None and len(loss.finite.values) > 2 and loss.last < loss.first:
        said.append(f"Nine tenths of the fall of the loss were done by step {_reached(loss, 0.9):,.0f}.")
    train, test = _first_of(view, ACCURACIES), view.series.get("accuracy/test")
    if train is not None and test is not None and min(len(train.finite.values), len(test.finite.values)) > 3:
        learnt, general = _reached(train, 0.9), _reached(test, 0.9)
        if test.last > test.first + 0.3 and general > 3 * max(learnt, 1.0):
            said.append(
                f"Test accuracy came late: train had it by step {learnt:,.0f}, test only by {general:,.0f} (grokking)."
            )
    changes = _changes_of_lead(view)
    if changes:
        said.append(
            "The lead in learning passed "
            + ", ".join(f"to layer {name} at step {step:,.0f}" for step, name in changes[:4])
            + "."
        )
    return said


def _reached(series: Series, part: float) -> float:
    """The first step at which ``part`` of the whole change from start to end was done."""
    known = series.finite
    whole = known.values[-1] - known.values[0]
    done = (known.values - known.values[0]) / whole if whole else np.ones_like(known.values)
    return float(known.steps[np.argmax(done >= part)])


def _changes_of_lead(view: RunView) -> list[tuple[float, str]]:
    """Steps at which another layer took the lead and kept it: for two records and a fifth of the run at least."""
    family = {name: s for name, s in view.family("share").items() if len(s.finite.values)}
    if len({s.steps.tobytes() for s in family.values()}) != 1:
        return []
    names = list(family)
    values = np.stack([np.nan_to_num(s.values, nan=-np.inf) for s in family.values()])
    leaders, steps = values.argmax(0), next(iter(family.values())).steps
    changes, current, held = [], int(leaders[0]), max(2, len(steps) // 5)
    for place in range(1, len(steps) - held + 1):
        if leaders[place] != current and (leaders[place : place + held] == leaders[place]).all():
            current = int(leaders[place])
            changes.append((float(steps[place]), names[current]))
    return changes


def _features(view: RunView) -> list[str]:
    growth = {name: s.last - s.first for name, s in view.family("target_linearity").items() if len(s.finite.values) > 1}
    if not growth:
        return []
    most = max(growth, key=lambda name: abs(growth[name]))
    series = view.series[f"target_linearity/{most}"]
    return [f"Target linearity changed most in layer {most}: {number(series.first)} → {number(series.last)}."]


def _prediction(view: RunView) -> list[str]:
    words = missed(view)
    return [f"First-order theory missed {words}."] if words else []


def _troubles(view: RunView) -> list[str]:
    said = []
    for name, series in view.series.items():
        bad = series.steps[~np.isfinite(series.values)]
        if len(bad):
            at = f"step {bad[0]:,.0f}" if len(bad) == 1 else f"{len(bad)} records, first at step {bad[0]:,.0f}"
            said.append(f"{name} is not a finite number at {at}.")
    grouped: dict[tuple[str, str], list[int]] = {}
    for step, measure, message in view.failures:
        grouped.setdefault((measure, message), []).append(step)
    for (measure, message), steps in grouped.items():
        times = "" if len(steps) == 1 else f" and {len(steps) - 1} more"
        said.append(f"Measure {measure} failed at step {steps[0]:,}{times}: {message}")
    loss = _first_of(view, LOSSES)
    if loss is not None and len(loss.finite.values) > 1 and loss.last > 1.5 * abs(loss.first):
        said.append(f"The loss rose: {number(loss.first)} → {number(loss.last)}.")
    notes = view.meta.get("notes")
    said += [str(note) for note in notes] if isinstance(notes, list) else []
    return [*said, *view.notes]
