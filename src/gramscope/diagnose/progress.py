"""How far a run has come: what several rules ask of the losses."""

import math

import numpy as np

from gramscope.diagnose.history import History, Series

LONG = 50  # values: a series of batches, not of measurements
FALLS = 0.9  # of the loss in the middle of the run, or less, is left
LEARNT = 0.5  # of the first loss: a run that removed more of it is learning


def removed(history: History) -> float:
    """The part of the first loss that is gone at the end, on the probe where it was measured: 0 nothing, 1 all.

    A network that was trained before starts below chance, and what it had learnt then counts too.
    """
    loss = history.loss.finite
    if len(loss) < 2:
        return math.nan
    chance = history.value("probe/chance") if history.has("loss/probe") else math.nan
    return _fallen(max(loss.first, np.nan_to_num(chance, nan=loss.first)), end_of(loss))


def removed_in_batches(history: History) -> float:
    """The same of the batches' loss: the median of the first tenth against that of the last."""
    loss = history.batch_loss.finite
    if len(loss) < 10:
        return math.nan
    first = float(np.median(loss.values[: max(3, len(loss) // 20)]))
    return _fallen(first, end_of(loss))


def _fallen(first: float, last: float) -> float:
    """The fall against the size of what was there first, which may be negative: a likelihood has no zero."""
    return (first - last) / abs(first) if first else math.nan


def falls(history: History) -> bool:
    """Whether the probe's loss falls clearly: by a tenth in the later half of the steps. Such a run is learning."""
    loss = history.probe_loss.finite
    return len(loss) > 2 and end_of(loss) < FALLS * at(loss, (loss.steps[0] + loss.steps[-1]) / 2)


def end_of(loss: Series) -> float:
    """The last value; of a series of batches, which is long, the median of the last tenth."""
    values = loss.finite.values
    count = len(values) // 10 if len(values) >= LONG else 1
    return float(np.median(values[-count:])) if len(values) else math.nan


def later_half(series: Series) -> Series:
    """The records of the second half of a series, by number: schedules are often logarithmic in the step."""
    return Series(series.steps[len(series) // 2 :], series.values[len(series) // 2 :])


def later_part(series: Series) -> Series:
    """The last tenth of a series, at least ten values of it."""
    count = max(10, len(series) // 10)
    return Series(series.steps[-count:], series.values[-count:])


def at(series: Series, step: float) -> float:
    """The value at a step, by straight lines between those that are known."""
    return float(np.interp(step, series.steps, series.values)) if len(series) else math.nan


def ended_finite(history: History) -> bool:
    """Whether the last losses that are known are numbers."""
    known = [s for s in (history.probe_loss, history.batch_loss) if len(s)]
    return all(np.isfinite(s.values[-1]) for s in known)
