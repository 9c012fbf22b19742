"""The table ``published | ours ± sd | 95 % interval | verdict``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gramscope.reproduce.expected import Expected

RESAMPLES = 10_000
AGREES, DIFFERS, NEW, NOT_RUN, NOT_FINITE = "agrees", "differs", "new", "not run", "not finite"
CONTROL = "control: "  # before the word of a number that is not counted


@dataclass(frozen=True)
class Verdict:
    """One expected number beside ours: mean, standard deviation and bootstrap interval of the mean over the seeds."""

    expected: Expected
    seeds: int
    mean: float
    sd: float
    interval: tuple[float, float]
    verdict: str


def judge(table: pd.DataFrame, expected: Sequence[Expected]) -> list[Verdict]:
    return [_one(table, value) for value in expected]


def _one(table: pd.DataFrame, value: Expected) -> Verdict:
    ours = selected(table, value)
    if len(ours) == 0:
        return Verdict(value, 0, math.nan, math.nan, (math.nan, math.nan), NOT_RUN)
    mean = float(ours.mean())
    sd = float(ours.std(ddof=1)) if len(ours) > 1 else math.nan
    return Verdict(value, len(ours), mean, sd, bootstrap_interval(ours), _word(value, mean))


def _word(value: Expected, mean: float) -> str:
    if not math.isfinite(mean):
        return NOT_FINITE
    if value.published is None:
        return NEW
    return (CONTROL if value.control else "") + (AGREES if value.allows(mean) else DIFFERS)


def selected(table: pd.DataFrame, value: Expected) -> NDArray[np.float64]:
    """The number of all jobs whose settings are those of ``value.case``, one for each seed."""
    if value.name not in table.columns or any(key not in table.columns for key in value.case):
        return np.empty(0)
    fits = np.ones(len(table), dtype=bool)
    for key, wanted in value.case.items():
        fits &= (table[key] == wanted).to_numpy()
    return table.loc[fits, value.name].to_numpy(dtype=np.float64)


def bootstrap_interval(values: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, from 10,000 resamples with replacement; NaN for fewer than two values.

    >>> low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    >>> 1 <= low < 2.5 < high <= 4
    True
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    rows = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[rows].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
