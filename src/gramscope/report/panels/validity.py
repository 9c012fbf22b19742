"""What of a run can be judged: where it diverged, where other layers began to train, whether there is enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gramscope.report.figure import Numbers
from gramscope.report.panels.drawing import number
from gramscope.report.view import RunView, Series, in_order

BLOWN = 100.0  # times the loss at the start: no learning ends there
ENOUGH_READINGS, ENOUGH_STEPS = 3, 10
STATE = ("norm/parameters", "loss/probe")  # of the network itself
LOSSES = ("loss/probe", "loss")  # that of the probe, which no choice of a batch disturbs, where it was measured


@dataclass(frozen=True)
class Divergence:
    """The first record of a run's ruin, which lasts to its end, and what is wrong there in words."""

    step: int
    how: str


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
    """None where the run ended with finite numbers of a usual size; one bad record in between is no divergence."""
    found = [end for end in (_not_finite(view), _blown_up(view)) if end is not None]
    return min(found, key=lambda end: end.step, default=None)


def _not_finite(view: RunView) -> Divergence | None:
    held = [view.series[name] for name in STATE if name in view.series]
    first: dict[int, list[str]] = {}
    for series in held:
        step = _tail(series.steps, ~np.isfinite(series.values))
        if step is not None:
            first.setdefault(step, []).append("weights" if series.name == "norm/parameters" else "loss")
    batch = _ruined_loss(view, held)
    if batch is not None and "loss" not in first.setdefault(batch, []):
        first[batch].append("loss")
    ruined = _tail(
        np.array(view.steps, dtype=np.float64),
        np.isin(view.steps, [step for step, _, message in view.failures if speaks_of_finite(message)]),
    )
    if ruined is not None:
        first.setdefault(ruined, ["weights or loss"])
    if not first:
        return None
    step = min(first)
    what = " and ".join(dict.fromkeys(first[step]))
    return Divergence(step, f"from there on its {what} {'is' if what == 'loss' else 'are'} not finite")


def _ruined_loss(view: RunView, held: Sequence[Series]) -> int | None:
    """The step from which the loss that was logged is not finite up to the end.

    One batch may have an infinite loss where a gradient scaler then leaves the weights alone: a single such record at
    the end is no divergence, if the weights or the probe's loss were read then or later and were finite.
    """
    loss = view.series.get("loss")
    step = None if loss is None else _tail(loss.steps, ~np.isfinite(loss.values))
    if loss is None or step is None:
        return None
    vouched = any(series.finite.steps[-1] >= step for series in held if len(series.finite.steps))
    return None if vouched and int((loss.steps >= step).sum()) == 1 else step


def speaks_of_finite(message: str) -> bool:
    """Whether a measure refused because the numbers it was given were NaN or infinite."""
    return "must be finite" in message


def _blown_up(view: RunView) -> Divergence | None:
    found = []
    for name in LOSSES:
        if name not in view.series or not tells_change(view, view.series[name]):
            continue
        loss = view.series[name].finite
        start = float(np.abs(loss.values[: max(1, len(loss.values) // 10)]).max())
        step = _tail(loss.steps, loss.values > BLOWN * start) if start > 0 else None
        if step is not None:
            how = f"from there on its loss is over {BLOWN:.0f} times that at the start ({change(view, loss)})"
            found.append(Divergence(step, how))
    return min(found, key=lambda end: end.step, default=None)


def _tail(steps: Numbers, bad: np.ndarray) -> int | None:
    """The step from which all is bad up to the end."""
    if not len(bad) or not bad[-1]:
        return None
    good = np.flatnonzero(~bad)
    return int(steps[good[-1] + 1 if len(good) else 0])


def until(view: RunView, step: int) -> RunView:
    """The run as it was before this step."""
    kept = {}
    for name, series in view.series.items():
        early = series.steps < step
        if early.any():
            kept[name] = Series(name, series.steps[early], series.values[early])
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
    return readings(series) >= ENOUGH_READINGS and float(series.finite.steps[0]) <= view.start + 1


def readings(series: Series) -> int:
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
