"""Rank correlations over jobs: against SciPy and a regression, intervals, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from gramscope.base.errors import InputError
from gramscope.reproduce.correlations import rank_correlation


def columns(seed, n=30):
    rng = np.random.default_rng(seed)
    c = rng.normal(size=n)
    a, b = c + rng.normal(size=n), c + rng.normal(size=n)
    return a.round(1), b.round(1), c  # rounded: with ties


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_is_spearmans_and_the_partial_one_is_that_of_residuals(seed):
    a, b, c = columns(seed)
    assert rank_correlation(a, b).value == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    x = np.stack([np.ones(len(a)), rankdata(c)], axis=1)
    left, right = (rankdata(v) - x @ np.linalg.lstsq(x, rankdata(v), rcond=None)[0] for v in (a, b))
    want = float(left @ right / np.sqrt((left @ left) * (right @ right)))
    assert rank_correlation(a, b, given=c).value == pytest.approx(want, abs=1e-10)


def test_interval_holds_the_value_and_whole_cases_widen_it():
    """Ten copies of each of six cases are six observations, not sixty."""
    rng = np.random.default_rng(0)
    a, b = np.repeat(rng.normal(size=(2, 6)), 10, axis=1)
    cases = np.repeat(np.arange(6), 10).tolist()
    alone, together = rank_correlation(a, b), rank_correlation(a, b, groups=cases)
    assert alone.value == together.value
    assert alone.low <= alone.value <= alone.high
    assert together.high - together.low > 1.5 * (alone.high - alone.low)


def test_a_nan_is_left_out_and_too_few_jobs_say_nothing():
    a, b, _ = columns(1)
    holes = a.copy()
    holes[:5] = np.nan
    assert rank_correlation(holes, b).jobs == 25
    assert rank_correlation(holes, b).value == rank_correlation(a[5:], b[5:]).value
    few = rank_correlation(a[:3], b[:3])
    assert np.isnan(few.value)
    assert not few.is_clear
    assert np.isnan(rank_correlation(a, np.ones(30)).value)


def test_columns_and_groups_must_fit():
    with pytest.raises(InputError, match="one length"):
        rank_correlation([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="case of each of the 2 rows"):
        rank_correlation([1.0, 2.0], [1.0, 2.0], groups=["a"])
