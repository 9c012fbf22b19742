"""Where a run diverged: one definition, for the diagnosis, the verdict and the words of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gramscope.diagnose.thresholds import BLOWN, ENOUGH_READINGS

Numbers = NDArray[np.float64]
STATE = ("norm/parameters", "loss/probe")  # of the network itself
LEARNT_NOTHING = 0.95  # of its loss at the start, or more, a run has that came back from far above it with nothing
LOSSES = ("loss/probe", "loss")  # that of the probe, which no choice of a batch disturbs, where it was measured


@runtime_checkable
class Points(Protocol):
    """A number over the steps."""

    @property
    def steps(self) -> Numbers: ...

    @property
    def values(self) -> Numbers: ...


@dataclass(frozen=True)
class Divergence:
    """The first record of a run's ruin, which lasts to its end.

    ``what``: what is not finite from there on ("loss", "weights", ...). ``blown``: the loss that is finite and over
    a hundred times that at the start, or was so and ends no lower than it started; empty otherwise.
    """

    step: int
    what: str = ""
    blown: str = ""


def find_divergence(
    series: Mapping[str, Points], steps: Sequence[int], ruined: Sequence[int] = ()
) -> Divergence | None:
    """None where the run ended with finite numbers of a usual size; one bad record in between is no divergence.

    ``series``: those of :data:`STATE` and :data:`LOSSES` are looked at. ``steps``: of the records. ``ruined``: those at
    which measures refused numbers that were not finite.

    >>> from gramscope.diagnose.history import Series
    >>> steps = np.arange(4.0)
    >>> find_divergence({"loss": Series(steps, np.array([1.0, 0.9, np.nan, np.nan]))}, [0, 1, 2, 3])
    Divergence(step=2, what='loss', blown='')
    """
    found = [end for end in (_not_finite(series, steps, ruined), _blown_up(series, steps)) if end is not None]
    return min(found, key=lambda end: end.step, default=None)


def _not_finite(series: Mapping[str, Points], steps: Sequence[int], ruined: Sequence[int]) -> Divergence | None:
    held = {name: series[name] for name in STATE if name in series}
    first: dict[int, list[str]] = {}
    for name, own in held.items():
        step = tail(own.steps, ~np.isfinite(own.values))
        if step is not None:
            first.setdefault(step, []).append("weights" if name == "norm/parameters" else "loss")
    batch = _ruined_loss(series.get("loss"), list(held.values()))
    if batch is not None and "loss" not in first.setdefault(batch, []):
        first[batch].append("loss")
    refused = tail(np.array(steps, dtype=np.float64), np.isin(steps, ruined))
    if refused is not None:
        first.setdefault(refused, ["weights or loss"])
    return Divergence(min(first), " and ".join(dict.fromkeys(first[min(first)]))) if first else None


def _ruined_loss(loss: Points | None, held: Sequence[Points]) -> int | None:
    """The step from which the loss that was logged is not finite up to the end.

    One batch may have an infinite loss where a gradient scaler then leaves the weights alone: a single such record at
    the end is no divergence, if the weights or the probe's loss were read then or later and were finite.
    """
    step = None if loss is None else tail(loss.steps, ~np.isfinite(loss.values))
    if loss is None or step is None:
        return None
    known = [own.steps[np.isfinite(own.values)] for own in held]
    vouched = any(own[-1] >= step for own in known if len(own))
    return None if vouched and int((loss.steps >= step).sum()) == 1 else step


def _blown_up(series: Mapping[str, Points], steps: Sequence[int]) -> Divergence | None:
    found = []
    for name in LOSSES:
        own = series.get(name)
        finite = np.isfinite(own.values) if own is not None else np.zeros(0, dtype=bool)
        if own is None or finite.sum() < ENOUGH_READINGS or own.steps[finite][0] > (steps[0] if len(steps) else 0) + 1:
            continue
        values = own.values[finite]
        start = float(np.abs(values[: max(1, len(values) // 10)]).max())
        high = values > BLOWN * start if start > 0 else np.zeros_like(values, dtype=bool)
        step = tail(own.steps[finite], high)
        if step is None and high.any() and name in STATE and values[-1] > LEARNT_NOTHING * start:
            step = int(own.steps[finite][high.argmax()])
        if step is not None:
            found.append(Divergence(step, blown=name))
    return min(found, key=lambda end: end.step, default=None)


def tail(steps: Numbers, bad: NDArray[np.bool_]) -> int | None:
    """The step from which all is bad up to the end."""
    if not len(bad) or not bad[-1]:
        return None
    good = np.flatnonzero(~bad)
    return int(steps[good[-1] + 1 if len(good) else 0])


def speaks_of_finite(message: str) -> bool:
    """Whether a measure refused because the numbers it was given were NaN or infinite.

    One that looks ahead, at the network after a step that is rehearsed, says nothing of the network as it stands.
    """
    return "must be finite" in message and "after the step" not in message
