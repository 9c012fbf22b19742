"""What of a run can be judged: where it diverged, where other layers began to train, whether there is enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gramscope.diagnose import history
from gramscope.diagnose.divergence import Divergence, find_divergence, speaks_of_finite
from gramscope.diagnose.loss_of_probe import loss_of_another_kind
from gramscope.diagnose.thresholds import BLOWN, ENOUGH_READINGS, ENOUGH_STEPS
from gramscope.report.panels.drawing import number
from gramscope.report.view import RunView, Series, in_order


@dataclass(frozen=True)
class Retrained:
    """Where the set of layers that train changed: the tangent kernel is a sum over other parameters from there on."""

    step: int
    joined: Sequence[str]
    left: Sequence[str]

    def __str__(self) -> str:
        parts = [f"{_few(names)} {word}" for names, word in ((self.joined, "joined"), (self.left, "left")) if names]
        return f"the layers that train changed at step {self.step:,} ({'; '.join(parts)})"


def divergence(view: RunView) -> Divergence | None:
    """None where the run ended with finite numbers of a usual size; as the diagnosis has it."""
    ruined = [step for step, _, message in view.failures if speaks_of_finite(message)]
    return find_divergence(view.series, view.steps, ruined)


def how_it_diverged(view: RunView, end: Divergence) -> str:
    """What is wrong from that step on, in words."""
    if end.blown:
        loss = view.series[end.blown].finite
        over = f"over {BLOWN:.0f} times that at the start"
        lasts = float(loss.values[loss.steps >= end.step].min()) > BLOWN * abs(loss.first)
        how = f"from there on its loss is {over}" if lasts else f"its loss was {over}, and it ends no lower than there"
        return f"{how} ({change(view, loss)})"
    return f"from there on its {end.what} {'is' if end.what == 'loss' else 'are'} not finite"


def until(view: RunView, step: int) -> RunView:
    """The run as it was before this step."""
    kept = {}
    for name, series in view.series.items():
        early = series.steps < step
        if early.any():
            kept[name] = Series(series.steps[early], series.values[early])
    return replace(view, series=kept, steps=[s for s in view.steps if s < step])


def sound(view: RunView) -> RunView:
    """The part of a run that words may be said about: all of it, or what came before it diverged."""
    end = divergence(view)
    return view if end is None else until(view, end.step)


def retrained(view: RunView) -> Retrained | None:
    """The first change of the set of layers whose shares were measured, which are those that train."""
    shares = {name.removeprefix("share/"): s.steps for name, s in view.series.items() if name.startswith("share/")}
    if all(np.array_equal(own, next(iter(shares.values()))) for own in shares.values()):
        return None
    steps = np.unique(np.concatenate(list(shares.values())))
    measured = np.stack([np.isin(steps, own) for own in shares.values()])  # (layers, steps)
    changes = np.flatnonzero((measured[:, 1:] != measured[:, :-1]).any(0))
    if not len(changes):
        return None
    before, after = measured[:, changes[0]], measured[:, changes[0] + 1]
    names = in_order(shares, view.layer_order)
    place = {name: index for index, name in enumerate(shares)}
    joined = [name for name in names if after[place[name]] and not before[place[name]]]
    left = [name for name in names if before[place[name]] and not after[place[name]]]
    return Retrained(int(steps[changes[0] + 1]), joined, left)


def enough(view: RunView, series: Series | None) -> bool:
    """Whether a series was measured often enough, from the start and over enough steps, for a verdict to rest on it."""
    return series is not None and tells_change(view, series) and _span(series) >= ENOUGH_STEPS


def tells_change(view: RunView, series: Series) -> bool:
    """Whether a series may be said to have fallen, risen or changed: measured from the start on, three times or more.

    The first number that a loop logs is that of its first step.
    """
    return times_measured(series) >= ENOUGH_READINGS and float(series.finite.steps[0]) <= view.start + 1


def times_measured(series: Series) -> int:
    return len(series.finite.values)


def _span(series: Series) -> float:
    steps = series.finite.steps
    return float(steps[-1] - steps[0]) if len(steps) else 0.0


def at_step(series: Series, place: int = -1) -> str:
    """The step of a finite value of a series, the last one if not said otherwise."""
    return f"step {series.finite.steps[place]:,.0f}"


def change(view: RunView, series: Series, say: Callable[[float], str] = number) -> str:
    """From the first number to the last, each with its step, where that is a change of the run; else the last alone."""
    known = series.finite
    if not len(known.values):
        return "never finite" if len(series.values) else "not measured"
    first = f"{say(known.first)} at {at_step(series, 0)} → " if tells_change(view, series) else ""
    stopped = ", then not finite" if known.steps[-1] < series.steps[-1] else ""
    return f"{first}{say(known.last)} at {at_step(series)}{stopped}"


def other_loss(view: RunView) -> str:
    """Why the probe's loss is not the one that the batches are trained on; empty where it may be."""
    logged = {name: history.Series(view.series[name].steps, view.series[name].values)
              for name in history.LOGGED_LOSSES if name in view.series}  # fmt: skip
    measured = {name: history.Series(s.steps, s.values) for name, s in view.series.items() if name not in logged}
    return loss_of_another_kind(history.History(measured, logged))


def begun_again(series: Series) -> int | None:
    """The step at which a drift is exactly 0 once more: a resumed run measured it from there, not from the start."""
    known = series.finite
    moved = np.flatnonzero(known.values > 0)
    again = np.flatnonzero(known.values == 0)
    again = again[again > moved[0]] if len(moved) else again[:0]
    # Rounding alone may bring a network that stands still back to 0.
    return int(known.steps[again[-1]]) if len(again) and known.values[: again[-1]].max() > 1e-6 else None


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
