"""Rank correlations over the jobs of an experiment, with bootstrap intervals that resample whole cases."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from gramscope.base.errors import InputError

LEAST = 4  # jobs below which a correlation says nothing
RESAMPLES = 500


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ with its 95 % interval and the number of jobs; NaN where there are fewer than four."""

    value: float
    low: float
    high: float
    jobs: int

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def rank_correlation(
    a: ArrayLike, b: ArrayLike, *, given: ArrayLike | None = None, groups: Sequence[object] | None = None, seed: int = 0
) -> RankCorrelation:
    """Spearman's ρ of two columns, and its 95 % percentile interval from 500 resamples.

    ``given`` takes a third column out: ``ρ_{ab·c} = (ρ_ab − ρ_ac ρ_bc) / √((1 − ρ_ac²)(1 − ρ_bc²))``, the partial rank
    correlation. ``groups`` are resampled whole: the seeds of one case are not independent of each other. Rows with a
    NaN are left out.

    >>> x = np.arange(12.0)
    >>> rank_correlation(x, x**3).value
    1.0
    >>> str(rank_correlation(x, -x))
    '-1.00 (-1.00 to -1.00)'
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (a, b, *([] if given is None else [given]))]
    if len({len(column) for column in columns}) > 1:
        raise InputError(f"the columns must have one length, got {[len(column) for column in columns]}.")
    if groups is not None and len(groups) != len(columns[0]):
        raise InputError(f"groups must name the case of each of the {len(columns[0])} rows, got {len(groups)}.")
    rows = np.stack(columns, axis=1)
    known = np.isfinite(rows).all(axis=1)
    labels = (
        np.arange(len(rows)) if groups is None else np.unique([str(group) for group in groups], return_inverse=True)[1]
    )
    rows, labels = rows[known], labels[known]
    if len(rows) < LEAST:
        return RankCorrelation(np.nan, np.nan, np.nan, len(rows))
    drawn = [_correlation(rows[chosen]) for chosen in _resampled(labels, seed)]
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if np.isfinite(drawn).any() else (np.nan, np.nan)
    return RankCorrelation(_correlation(rows), float(low), float(high), len(rows))


def _resampled(labels: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
    """Rows of as many cases as there are, drawn with replacement."""
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return [
        np.concatenate([members[k] for k in rng.integers(len(members), size=len(members))]) for _ in range(RESAMPLES)
    ]


def _correlation(rows: NDArray[np.float64]) -> float:
    """Of the first two columns, given the third if there is one; NaN where a column does not vary."""
    ranks = rankdata(rows, axis=0)
    if (np.ptp(ranks, axis=0) == 0).any():
        return float("nan")
    rho = np.atleast_2d(np.corrcoef(ranks, rowvar=False))
    if rows.shape[1] == 2:
        return float(rho[0, 1])
    rest = (1 - rho[0, 2] ** 2) * (1 - rho[1, 2] ** 2)
    return float((rho[0, 1] - rho[0, 2] * rho[1, 2]) / np.sqrt(rest)) if rest > 1e-12 else float("nan")
