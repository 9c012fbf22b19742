"""The run in plain words: lazy or rich, which layer learns, what changed when, and what went wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gramscope.report.panels.drawing import number, percent
from gramscope.report.panels.kernels import moved, written_as_alignment
from gramscope.report.panels.steps import missed
from gramscope.report.panels.validity import (
    BLOWN,
    ENOUGH_READINGS,
    ENOUGH_STEPS,
    LOSSES,
    Divergence,
    begun_again,
    change,
    divergence,
    enough,
    readings,
    retrained,
    sound,
    speaks_of_finite,
    tells_change,
)
from gramscope.report.view import RunView, Series

LAZY, RICH = 0.5, 1.0  # of |K - K₀| / |K₀|: below a half stands still, from its own size on has moved
LAZY_ALIGNED, RICH_ALIGNED = 0.1, 0.3  # of 1 - alignment with the start, where that was recorded instead
RICH_FEATURES, LAZY_FEATURES = 0.2, 0.5  # of D_LR
IDLE = 0.02  # a layer with a smaller share does not learn
STILL = 0.05  # a loss that fell by a smaller part of itself has not been learnt
RULE = (
    f"lazy or rich is judged by how far the kernel moved, as a fraction of its size at the start (below {LAZY} lazy, "
    f"above {RICH} rich; of one minus the alignment {LAZY_ALIGNED} and {RICH_ALIGNED}); without a kernel by D_LR "
    f"(above {LAZY_FEATURES} lazy, below {RICH_FEATURES} rich); a verdict takes {ENOUGH_READINGS} readings from "
    f"the start on, over {ENOUGH_STEPS} steps, and a run whose loss ends not finite or over {BLOWN:.0f} times its "
    "start diverged"
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
        return Words(view.name, view.index, "No step has been committed yet.", (), tuple(_troubles(view, None)))
    end, part = divergence(view), sound(view)
    found = _outcome(view)
    if len(part.steps):
        before = [*_layers(part), *_moments(part), *_features(part), *_prediction(part)]
        found += before if end is None else [f"Before it diverged: {line}" for line in before]
    return Words(view.name, view.index, _verdict(view, end), tuple(found), tuple(_troubles(view, end)))


def compared(views: Sequence[RunView]) -> list[str]:
    """What several runs say beside each other; a run that diverged is named, and ranked in nothing."""
    if len(views) < 2:
        return []
    ends = {view.name: end for view in views if (end := divergence(view)) is not None}
    ranked = [view for view in views if view.name not in ends]
    said = [f"{name} diverged at step {end.step:,} and is not ranked." for name, end in ends.items()]
    drifts = {view.name: drift.last for view in ranked if (drift := _drift(view)) is not None and enough(view, drift)}
    if len(drifts) > 1:
        most, least = max(drifts, key=lambda name: drifts[name]), min(drifts, key=lambda name: drifts[name])
        said.append(
            f"The kernel of {most} moved most ({number(drifts[most])}), of {least} least ({number(drifts[least])})."
        )
    return said + _ranking(ranked)


def _ranking(views: Sequence[RunView]) -> list[str]:
    for name in ("accuracy/test", "accuracy", *LOSSES):
        word = WORDS[name][0].lower() + WORDS[name][1:]
        ends = {view.name: view.series[name].last for view in views if name in view.series}
        ends = {run: value for run, value in ends.items() if not math.isnan(value)}
        if len(ends) > 1:
            high, low = max(ends, key=lambda run: ends[run]), min(ends, key=lambda run: ends[run])
            say = number if name in LOSSES else percent
            return [f"The {word} ends highest in {high} ({say(ends[high])}) and lowest in {low} ({say(ends[low])})."]
    return []


def _drift(view: RunView) -> Series | None:
    """How far the kernel moved, where that can be said: read twice, and from one start, of the same parameters."""
    drift = moved(view)
    if drift is None or readings(drift) < 2 or _undone(view) is not None:
        return None
    return drift


def _undone(view: RunView) -> str | None:
    """Why the drift that was recorded is not one from the start of the run; None where it is."""
    drift, switch = moved(view), retrained(view)
    if switch is not None:
        return f"{switch}, so the kernel's drift compares different parameters"
    again = begun_again(drift) if drift is not None else None
    return None if again is None else f"the kernel's drift was measured anew from step {again:,}, as after a restart"


def regime(view: RunView) -> str:
    """By the page's rule "lazy", "rich", "in between" or "diverged"; else "too short" to tell, or "unknown"."""
    if divergence(view) is not None:
        return "diverged"
    drift, richness = _drift(view), view.series.get("richness")
    if drift is not None and enough(view, drift):
        lazy, rich = (LAZY_ALIGNED, RICH_ALIGNED) if _aligned(view) else (LAZY, RICH)
        return "lazy" if drift.last < lazy else "rich" if drift.last > rich else "in between"
    if richness is not None and enough(view, richness):
        value = richness.last
        return "lazy" if value > LAZY_FEATURES else "rich" if value < RICH_FEATURES else "in between"
    return "too short" if any(s is not None and readings(s) for s in (moved(view), richness)) else "unknown"


def _aligned(view: RunView) -> bool:
    return written_as_alignment(view.series["kernel/drift"])


def _verdict(view: RunView, end: Divergence | None) -> str:
    kind, drift, richness = regime(view), _drift(view), view.series.get("richness")
    if end is not None:
        return f"The run diverged at step {end.step:,}: {end.how}."
    if kind == "too short":
        return _too_short(view)
    grounds = []
    if drift is not None:
        grounds.append(f"kernel drift {number(drift.last)}")
    if richness is not None and not math.isnan(richness.last):
        grounds.append(f"D_LR {number(richness.last)}" + (" alone" if _undone(view) is not None else ""))
    because = f" ({', '.join(grounds)})" if grounds else ""
    lazy = "neither its features nor its loss moved much" if _unlearnt(view) else "its features hardly moved"
    return {
        "lazy": f"The run is lazy: {lazy}{because}.",
        "rich": f"The run is rich: it changed its features{because}.",
        "in between": f"The run lies between lazy and rich{because}.",
        "unknown": "Neither a kernel nor richness was recorded, so lazy or rich cannot be told.",
    }[kind]


def _too_short(view: RunView) -> str:
    why = _undone(view)
    if why is not None and enough(view, moved(view)):
        return f"Lazy or rich cannot be told: {why}."
    found = [series for series in (moved(view), view.series.get("richness")) if series is not None]
    most = max(readings(series) for series in found)
    return (
        f"There is not enough to tell lazy from rich: it takes {ENOUGH_READINGS} readings of the kernel or of richness "
        f"from the start on, over {ENOUGH_STEPS} steps, and there {'is' if most == 1 else 'are'} {most} up to step "
        f"{view.end:,}."
    )


def _unlearnt(view: RunView) -> bool:
    """Whether the probe's loss stands still too: then still features say nothing about how the network learns."""
    loss = view.series.get("loss/probe")
    return loss is not None and tells_change(view, loss) and loss.first - loss.last < STILL * abs(loss.first)


ACCURACIES = ("accuracy", "accuracy/probe")
WORDS = {
    "loss": "Loss",
    "loss/probe": "Loss on the probe",
    "accuracy": "Accuracy",
    "accuracy/probe": "Accuracy on the probe",
    "accuracy/test": "Test accuracy",
}


def _first_of(view: RunView, names: Sequence[str]) -> Series | None:
    """The first of which a change can be told, else the first that was measured at all."""
    found = [view.series[name] for name in names if name in view.series and readings(view.series[name])]
    return next((series for series in found if tells_change(view, series)), found[0] if found else None)


def _outcome(view: RunView) -> list[str]:
    said = []
    for names, say in ((LOSSES, number), (ACCURACIES, percent), (("accuracy/test",), percent)):
        series = _first_of(view, names)
        if series is not None:
            said.append(f"{WORDS[series.name]} {change(view, series, say)}")
    records = "1 record" if len(view.steps) == 1 else f"{len(view.steps):,} records"
    span = f"over {records} up to step {view.end:,}"
    return [f"{'; '.join(said)}, {span}."] if said else [f"Watched {span}."]


def _layers(view: RunView) -> list[str]:
    family = {name: s.finite for name, s in view.family("share").items() if len(s.finite.values)}
    if not family:
        return []
    first, last = _leader(family, 0), _leader(family, -1)
    share_first, share_last = percent(family[first].first), percent(family[last].last)
    if not all(tells_change(view, s) for s in family.values()):
        return [f"At step {family[last].steps[-1]:,.0f} layer {last} learns most ({share_last} of the loss decrease)."]
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
    drift = _drift(view)
    if drift is not None and regime(view) != "lazy" and tells_change(view, drift):
        half, most = _reached(drift, 0.5), _reached(drift, 0.9)
        said.append(
            f"Half of the kernel's movement was done by step {half:,.0f}, nine tenths by step {most:,.0f}."
            if half < most
            else f"Nine tenths of the kernel's movement were done by step {most:,.0f}."
        )
    loss = _first_of(view, LOSSES)
    if loss is not None and tells_change(view, loss) and loss.last < loss.first:
        said.append(f"Nine tenths of the fall of the loss were done by step {_reached(loss, 0.9):,.0f}.")
    train, test = _first_of(view, ACCURACIES), view.series.get("accuracy/test")
    if train is not None and test is not None and tells_change(view, train) and tells_change(view, test):
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
    """The first step from which on ``part`` of the whole change from start to end stays done."""
    known = series.finite
    whole = known.values[-1] - known.values[0]
    done = (known.values - known.values[0]) / whole if whole else np.ones_like(known.values)
    before = np.flatnonzero(done < part)
    return float(known.steps[before[-1] + 1 if len(before) else 0])


def _changes_of_lead(view: RunView) -> list[tuple[float, str]]:
    """Steps at which another layer took the lead and kept it: for two records and a fifth of the run at least."""
    family = {name: s for name, s in view.family("share").items() if tells_change(view, s)}
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
    growth = {name: s.last - s.first for name, s in view.family("target_linearity").items() if tells_change(view, s)}
    if not growth:
        return []
    most = max(growth, key=lambda name: abs(growth[name]))
    series = view.series[f"target_linearity/{most}"]
    first, last = number(series.first), number(series.last)
    if first == last:
        return ["Target linearity changed visibly in no layer."]
    return [f"Target linearity changed most in layer {most}: {first} → {last}."]


def _prediction(view: RunView) -> list[str]:
    words = missed(view)
    return [f"First-order theory missed {words}."] if words else []


def _troubles(view: RunView, end: Divergence | None) -> list[str]:
    said = [*_not_finite(view), *_failures(view)]
    loss = _first_of(view, LOSSES)
    if end is None and loss is not None and tells_change(view, loss) and loss.last > 1.5 * abs(loss.first):
        said.append(f"The loss rose: {number(loss.first)} → {number(loss.last)}.")
    why = _undone(view)
    if why is not None:
        said.append(f"{why[0].upper()}{why[1:]}; it is not judged.")
    notes = view.meta.get("notes")
    said += [str(note) for note in notes] if isinstance(notes, list) else []
    return [*said, *view.notes]


def _not_finite(view: RunView) -> list[str]:
    """One line for all names that went wrong at the same records."""
    grouped: dict[tuple[float, ...], list[str]] = {}
    for name, series in view.series.items():
        bad = series.steps[~np.isfinite(series.values)]
        if len(bad):
            grouped.setdefault(tuple(bad.tolist()), []).append(name)
    said = []
    for steps, names in grouped.items():
        at = f"step {steps[0]:,.0f}" if len(steps) == 1 else f"{len(steps):,} records, first at step {steps[0]:,.0f}"
        verb = "is not a finite number" if len(names) == 1 else "are not finite numbers"
        said.append(f"{_joined(names)} {verb} at {at}.")
    return said


def _failures(view: RunView) -> list[str]:
    """One line for all measures that failed at the same records for the same reason: a NaN fails them all."""
    causes: dict[tuple[str, str], list[int]] = {}
    for step, measure, message in view.failures:
        causes.setdefault((measure, message), []).append(step)
    grouped: dict[tuple[str, tuple[int, ...]], list[tuple[str, str]]] = {}
    for (measure, message), steps in causes.items():
        reason = "" if speaks_of_finite(message) else message
        grouped.setdefault((reason, tuple(steps)), []).append((measure, message))
    said = []
    for (_, failed), found in grouped.items():
        names = list(dict.fromkeys(measure for measure, _ in found))
        times = "" if len(failed) == 1 else f" and {len(failed) - 1:,} more"
        what = "Measure" if len(names) == 1 else "Measures"
        said.append(f"{what} {_joined(names, 8)} failed at step {failed[0]:,}{times}: {found[0][1]}")
    return said


def _joined(names: Sequence[str], most: int = 4) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
