"""The run in plain words: lazy or rich, which layer learns and what changed when. What is wrong, the diagnosis says."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gramscope.diagnose.alerts import is_loss
from gramscope.diagnose.divergence import LOSSES, Divergence, speaks_of_finite
from gramscope.diagnose.thresholds import QUIET_SHARE
from gramscope.report.advice import TOPICS, Sentence
from gramscope.report.panels.drawing import number, percent
from gramscope.report.panels.kernels import largest
from gramscope.report.panels.layers import linearity_change, who_learns
from gramscope.report.panels.steps import prediction_error
from gramscope.report.panels.validity import (
    at_step,
    change,
    divergence,
    enough,
    other_loss,
    sound,
    tells_change,
    times_measured,
)
from gramscope.report.regimes import STILL, kernel_drift, regime, undone, unlearnt, verdict
from gramscope.report.view import RunView, Series, measure_of

CAME_BACK = 1.5  # times its last drift was the largest
GAP = 0.1  # of train accuracy over test accuracy: less is no overfitting; a convention


@dataclass(frozen=True)
class Words:
    """What the page says of one run: a verdict in one sentence, then findings, then warnings.

    ``undefined`` is what could not be measured because there was nothing to measure, which is nobody's mistake.
    """

    name: str
    index: int
    verdict: Sentence
    findings: Sequence[Sentence]
    warnings: Sequence[str]
    undefined: Sequence[str]


def in_words(view: RunView) -> Words:
    """The findings of one run, each with the number it rests on."""
    if not len(view.steps):
        empty = Sentence("No step has been committed yet.")
        return Words(view.name, view.index, empty, (), tuple(_troubles(view, None)), ())
    end, part = divergence(view), sound(view)
    kind = regime(view)
    found = [Sentence(_outcome(view))]
    if len(part.steps):
        before = [
            *_layers(part),
            *_when(part),
            *overfitting(part),
            *_features(part),
            *_prediction(part),
        ]
        found += before if end is None else [replace(f, text=f"Before it diverged: {f.text}") for f in before]
    found += [Sentence(f"The run was resumed between steps {old:,} and {new:,}.") for old, new in view.resumed]
    topic = "not learnt" if kind in ("lazy", "rich") and unlearnt(view) else kind
    head = Sentence(verdict(view, end), topic if topic in TOPICS else "")
    undefined = tuple(_failures(view, undefined=True))
    return Words(view.name, view.index, head, tuple(found), tuple(_troubles(view, end)), undefined)


def compared(views: Sequence[RunView], *, ranked_by_result: bool = True) -> list[str]:
    """What several runs say beside each other; a run that diverged is named, and ranked in nothing."""
    if len(views) < 2:
        return []
    ends = {view.name: end for view in views if (end := divergence(view)) is not None}
    ranked = [view for view in views if view.name not in ends]
    said = [f"{name} diverged at step {end.step:,} and is not ranked." for name, end in ends.items()]
    if len(said) > 3:
        named = _joined([f"{name} at step {end.step:,}" for name, end in ends.items()])
        said = [f"{len(ends)} runs diverged and are not ranked: {named}."]
    drifts = {
        view.name: largest(drift)[1]
        for view in ranked
        if (drift := kernel_drift(view)) is not None and enough(view, drift)
    }
    if len(set(map(number, drifts.values()))) > 1:
        ordered = [f"{name} ({number(value)})" for name, value in sorted(drifts.items(), key=lambda item: item[1])]
        said.append(f"Largest kernel drift: {ordered[-1]}; smallest: {ordered[0]}.")
    return said + (_ranking(ranked) if ranked_by_result else [])


def _ranking(views: Sequence[RunView]) -> list[str]:
    for name in ("accuracy/test", "accuracy", *LOSSES):
        ends = {view.name: view.series[name].last for view in views if name in view.series}
        ends = {run: value for run, value in ends.items() if not math.isnan(value)}
        say = number if name in LOSSES else percent
        if len(set(map(say, ends.values()))) > 1:
            high, low = max(ends, key=lambda run: ends[run]), min(ends, key=lambda run: ends[run])
            highest, lowest = f"{high} ({say(ends[high])})", f"{low} ({say(ends[low])})"
            return [f"The {WORDS[name]} ends highest in {highest} and lowest in {lowest}."]
    return []


ACCURACIES = ("accuracy", "accuracy/probe")
WORDS = {
    "loss": "loss",
    "loss/probe": "loss on the probe",
    "accuracy": "accuracy",
    "accuracy/probe": "accuracy on the probe",
    "accuracy/test": "test accuracy",
}


def _first_name(view: RunView, names: Sequence[str]) -> str | None:
    """The first of which a change can be told, else the first that was measured at all."""
    found = [name for name in names if name in view.series and times_measured(view.series[name])]
    return next((name for name in found if tells_change(view, view.series[name])), found[0] if found else None)


def _first_of(view: RunView, names: Sequence[str]) -> Series | None:
    name = _first_name(view, names)
    return None if name is None else view.series[name]


def _outcome(view: RunView) -> str:
    said = []
    for names, say in ((LOSSES, number), (ACCURACIES, percent), (("accuracy/test",), percent)):
        name = _first_name(view, names)
        if name is not None:
            said.append(f"{WORDS[name]} {change(view, view.series[name], say)}")
        elif names is LOSSES:  # those of a GAN, say: "loss_d", "loss_g"
            own = [name for name in view.series if is_loss(name) and "/" not in name]
            said += [f"logged {name} {change(view, view.series[name])}" for name in own[:2]]
    records = "1 record" if len(view.steps) == 1 else f"{len(view.steps):,} records"
    outcome = "; ".join(said)
    return f"{outcome[0].upper()}{outcome[1:]} ({records})." if said else f"{records} up to step {view.end:,}."


def _layers(view: RunView) -> list[Sentence]:
    said = who_learns(view)
    if not said:
        return []
    family = {name: s.finite for name, s in view.family("share").items() if len(s.finite.values)}
    return [Sentence(said), *(_quiet(family) if all(tells_change(view, s) for s in family.values()) else [])]


def _quiet(family: Mapping[str, Series]) -> list[Sentence]:
    """Layers with next to no share: a fact. Whether it is a fault, and what to do, the diagnosis says."""
    quiet = min(QUIET_SHARE, 0.2 / len(family))  # of many layers each has little
    idle = [name for name, s in family.items() if float(np.abs(s.values).max()) < quiet]
    said = [f"{_listed(idle, len(family))} never had {percent(quiet)} of the learning."] if idle else []
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
    return [Sentence(text) for text in said]


def _listed(names: Sequence[str], layers: int, most: int = 3) -> str:
    if len(names) > most:
        return f"{len(names)} of {layers} layers ({', '.join(names[:most])} and {len(names) - most} more)"
    return f"Layer {names[0]}" if len(names) == 1 else f"Layers {_joined(names)}"


def _stopped(series: Series, quiet: float) -> float | None:
    """The step from which the share stays idle: at least three records and a fifth of the run."""
    busy = np.flatnonzero(np.abs(series.values) >= quiet)
    if not len(busy) or len(series.values) - busy[-1] - 1 < max(3, len(series.values) // 5):
        return None
    return float(series.steps[busy[-1] + 1])


def _when(view: RunView) -> list[Sentence]:
    said = []
    drift = kernel_drift(view)
    if drift is not None and tells_change(view, drift) and drift.last < largest(drift)[1] / CAME_BACK:
        step, most = largest(drift)
        said.append(f"The kernel's drift was largest at step {step:,.0f} ({number(most)}) and became smaller again.")
    elif drift is not None and regime(view) != "lazy" and tells_change(view, drift):
        half = _reached(drift, 0.5)
        begin = "90 % of the kernel's change was done"
        if half < _reached(drift, 0.9):
            begin = f"Half of the kernel's change was done by step {half:,.0f}, 90 %"
        said.append(f"{begin} {_most_done(drift)}.")
    loss = _first_of(view, LOSSES)
    if loss is not None and tells_change(view, loss) and loss.first - loss.last >= STILL * abs(loss.first):
        said.append(f"90 % of the loss decrease was done {_most_done(loss)}.")
    changes = _changes_of_lead(view)
    if changes:
        said.append(
            "The lead in learning passed "
            + ", ".join(f"to layer {name} at step {step:,.0f}" for step, name in changes[:4])
            + "."
        )
    return [*map(Sentence, said), *_late(view)]


def _most_done(series: Series) -> str:
    """By which step 90 % of the change was done; between which measurements, where they are far apart."""
    known, reached = series.finite, _reached(series, 0.9)
    place = int(np.searchsorted(known.steps, reached))
    before = float(known.steps[place - 1]) if place else reached
    coarse = reached - before > max(1.0, 0.05 * float(known.steps[-1] - known.steps[0]))
    return f"between steps {before:,.0f} and {reached:,.0f}" if coarse else f"by step {reached:,.0f}"


def _late(view: RunView) -> list[Sentence]:
    train, test = _first_of(view, ACCURACIES), view.series.get("accuracy/test")
    if train is None or test is None or not (tells_change(view, train) and tells_change(view, test)):
        return []
    learnt, general = _reached(train, 0.9), _reached(test, 0.9)
    if test.last <= test.first + 0.3 or general <= 3 * max(learnt, 1.0):
        return []
    text = f"Test accuracy came late: train had it by step {learnt:,.0f}, test only by {general:,.0f} (grokking)."
    return [Sentence(text, "grokking")]


TEST_LOSSES = ("loss/test", "loss/val", "loss/validation", "test_loss", "val_loss", "eval_loss")
TEST_ACCURACIES = ("accuracy/test", "accuracy/val", "accuracy/validation", "test_acc", "val_acc", "eval_accuracy")


def overfitting(view: RunView) -> list[Sentence]:
    """A test loss that rises again, or a test accuracy that stays behind; told of series with a beginning only."""
    loss = _first_of(view, TEST_LOSSES)
    if loss is not None and tells_change(view, loss):
        known = loss.finite
        best = int(known.values.argmin())
        if best < len(known.values) - 1 and known.last > 1.1 * float(known.values[best]) > 0:
            text = (
                f"The test loss was lowest at step {known.steps[best]:,.0f} ({number(float(known.values[best]))}) and "
                f"ends higher ({number(known.last)} at {at_step(loss)})."
            )
            return [Sentence(text, "overfitting")]
    name, test = _first_name(view, ACCURACIES), _first_of(view, TEST_ACCURACIES)
    train = view.series.get(name or "")
    if name is None or train is None or test is None or not (tells_change(view, train) and tells_change(view, test)):
        return []
    if train.last - test.last <= GAP:
        return []
    text = (
        f"The {WORDS[name]} ends at {percent(train.last)} ({at_step(train)}), test accuracy at {percent(test.last)} "
        f"({at_step(test)})."
    )
    return [Sentence(text, "overfitting")]


def _reached(series: Series, part: float) -> float:
    """The first step at which ``part`` of the whole change from start to end is done, and stays done.

    It stays done where nine of ten later measurements have it too, up to a twentieth of the change: one noisy value
    near the end must not move the step there.
    """
    known = series.finite
    whole = known.values[-1] - known.values[0]
    done = (known.values - known.values[0]) / whole if whole else np.ones_like(known.values)
    kept = np.cumsum((done >= part - 0.05)[::-1])[::-1] / np.arange(len(done), 0, -1)
    return float(known.steps[np.flatnonzero((done >= part) & (kept >= 0.9))[0]])


def _changes_of_lead(view: RunView) -> list[tuple[float, str]]:
    """Steps at which another layer took the lead and kept it: for two records and a fifth of the run at least."""
    family = {name: s for name, s in view.family("share").items() if tells_change(view, s)}
    if len({s.steps.tobytes() for s in family.values()}) != 1:
        return []
    names = list(family)
    values = np.stack([np.nan_to_num(s.values, nan=-np.inf) for s in family.values()])
    leaders, steps = values.argmax(0), next(iter(family.values())).steps
    changes, current, held = [], int(leaders[0]), max(2, len(steps) // 5)
    begins = np.flatnonzero(np.diff(leaders, prepend=-1))  # of each time that one layer leads without a break
    for place, length in zip(begins.tolist(), np.diff(np.append(begins, len(leaders))).tolist(), strict=True):
        if leaders[place] != current and length >= held:
            current = int(leaders[place])
            changes.append((float(steps[place]), names[current]))
    if changes and leaders[-1] != current:  # who leads at the end is told beside this
        changes.append((float(steps[begins[-1]]), names[leaders[-1]]))
    return changes


def _features(view: RunView) -> list[Sentence]:
    said = linearity_change(view)
    return [Sentence(said, "target linearity")] if said else []


def _prediction(view: RunView) -> list[Sentence]:
    words = prediction_error(view)
    return [Sentence(f"{words[0].upper()}{words[1:]}.", "first order")] if words else []


def _troubles(view: RunView, end: Divergence | None) -> list[str]:
    said = [*_not_finite(view), *_failures(view, undefined=False)]
    loss, other = _first_of(view, LOSSES), other_loss(view)
    if other:
        said.append(f"The loss on the probe is another one: {other}.")
    elif end is None and loss is not None and tells_change(view, loss) and loss.last > 1.5 * abs(loss.first):
        said.append(f"The loss rose: {change(view, loss)}.")
    why = undone(view)
    if why is not None:
        said.append(f"{why[0].upper()}{why[1:]}; it is not judged.")
    notes = view.meta.get("notes")
    said += [str(note) for note in notes] if isinstance(notes, list) else []
    return [*said, *view.notes]


def _not_finite(view: RunView) -> list[str]:
    """One line for all names that went wrong at the same records; what a failure explains is told there."""
    explained = {(step, measure) for step, measure, message in view.failures if _undefined(message)}
    grouped: dict[tuple[float, ...], list[str]] = {}
    for name, series in view.series.items():
        bad = [
            step
            for step in series.steps[~np.isfinite(series.values)].tolist()
            if not {(step, name), (step, measure_of(name))} & explained
        ]
        if bad:
            grouped.setdefault(tuple(bad), []).append(name)
    said = []
    for steps, names in grouped.items():
        at = f"step {steps[0]:,.0f}" if len(steps) == 1 else f"{len(steps):,} records, first at step {steps[0]:,.0f}"
        verb = "is not a finite number" if len(names) == 1 else "are not finite numbers"
        said.append(f"{_joined(names)} {verb} at {at}.")
    return said


NOT_DEFINED = "not defined: "  # how a measure says that there is nothing to measure, rather than that it failed


def _undefined(message: str) -> bool:
    """
    >>> _undefined("the alignment is not defined: it needs 2 examples"), _undefined("not defined: no labels")
    (True, True)
    """
    return message.startswith(NOT_DEFINED) or f"is {NOT_DEFINED}" in message


def _failures(view: RunView, *, undefined: bool) -> list[str]:
    """One line for all measures that failed at the same records for the same reason: a NaN fails them all.

    Of those that were not defined, or of those that failed otherwise.
    """
    causes: dict[tuple[str, str], list[int]] = {}
    for step, measure, message in view.failures:
        if _undefined(message) is undefined:
            causes.setdefault((measure, message), []).append(step)
    grouped: dict[tuple[str, tuple[int, ...]], list[tuple[str, str]]] = {}
    for (measure, message), steps in causes.items():
        reason = "" if speaks_of_finite(message) else message
        grouped.setdefault((reason, tuple(steps)), []).append((measure, message))
    return [_failure([name for name, _ in found], failed, found[0][1]) for (_, failed), found in grouped.items()]


def _failure(measures: Sequence[str], steps: Sequence[int], message: str) -> str:
    at = f"at step {steps[0]:,}" + ("" if len(steps) == 1 else f" and {len(steps) - 1:,} more")
    names = list(dict.fromkeys(measures))
    if _undefined(message):
        what = f"{_joined(names, 8)} is " * message.startswith(NOT_DEFINED)
        return f"{at[0].upper()}{at[1:]}: {what}{message.replace('. NaN is returned.', '').rstrip('.')}."
    return f"{'Measure' if len(names) == 1 else 'Measures'} {_joined(names, 8)} failed {at}: {message}"


def _joined(names: Sequence[str], most: int = 4) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
