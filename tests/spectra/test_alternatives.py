"""Alternatives of the power law against quadrature and a search without gradients."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from gramscope.spectra import TailFit, alternatives, fit_tail
from gramscope.spectra.alternative_tails import _log_normaliser
from references.spectra import truncated_fit, truncated_log_likelihood


def fit_from(x: np.ndarray) -> TailFit:
    """The power law on the whole sample, so that the tests choose the tail."""
    logs = np.log(x / x.min())
    alpha = 1 + len(x) / logs.sum()
    return TailFit(alpha, 0.0, float(x.min()), len(x), (alpha - 1) / math.sqrt(len(x)), float(x.max()), len(x))


def draw(kind: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "power":
        return 2 * (rng.pareto(1.5, n) + 1)
    if kind == "exponential":
        return 3 + rng.exponential(2.0, n)
    if kind == "narrow":
        return 5 + rng.random(n)
    return 1 + rng.gamma(0.6, 8.0, n)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["power", "exponential", "narrow", "gamma"])
def test_against_quadrature_and_search(kind, seed):
    x = draw(kind, 80, seed)
    fit = fit_from(x)
    found = alternatives(x, fit)
    power = len(x) * math.log((fit.alpha - 1) / fit.xmin) - fit.alpha * np.log(x / fit.xmin).sum()

    exponential = found["exponential"]
    rate = 1 / (x.mean() - fit.xmin)
    terms = math.log((fit.alpha - 1) / fit.xmin) - fit.alpha * np.log(x / fit.xmin)
    terms = terms - (math.log(rate) - rate * (x - fit.xmin))
    assert exponential.parameters["rate"] == pytest.approx(rate, rel=1e-12)
    assert exponential.ratio == pytest.approx(terms.sum(), abs=1e-9)
    assert exponential.p == pytest.approx(2 * norm.sf(abs(terms.sum()) / (terms.std() * math.sqrt(len(x)))), rel=1e-9)

    truncated = found["truncated"]
    _, _, best = truncated_fit(x, fit.xmin)
    # The search stops at 1e-13 a point and cannot reach the boundary itself; ours may only be better.
    assert truncated.log_likelihood >= best - 1e-7
    assert truncated.log_likelihood <= max(best, power) + 1e-5
    assert truncated.ratio == pytest.approx(min(power - truncated.log_likelihood, 0.0), abs=1e-8)
    if truncated.ratio < 0:
        assert truncated.p == pytest.approx(chi2.sf(-2 * truncated.ratio, 1) / 2, rel=1e-9)
    else:
        assert truncated.p == 1.0
    if truncated.parameters["rate"] > 0:
        stated = truncated_log_likelihood(x, fit.xmin, *truncated.parameters.values())
        assert truncated.log_likelihood == pytest.approx(stated, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(0, 60), log_kappa=st.floats(-12, 5))
def test_the_normaliser_is_the_integral(alpha, log_kappa):
    """Against mpmath's generalised exponential integral E_a(κ), which knows no difference of scales."""
    mpmath = pytest.importorskip("mpmath")
    kappa = math.exp(log_kappa)
    exact = float(mpmath.log(mpmath.expint(alpha, kappa)))
    log_norm, mean = _log_normaliser(alpha, kappa)
    assert log_norm == pytest.approx(exact, abs=1e-9)
    assert mean[1] == pytest.approx(float(mpmath.expint(alpha - 1, kappa) / mpmath.expint(alpha, kappa)), rel=1e-8)


def test_the_scale_does_not_matter():
    x = draw("gamma", 120, 0)
    plain, scaled = alternatives(x, fit_from(x)), alternatives(1e6 * x, fit_from(1e6 * x))
    for name in ("exponential", "truncated"):
        assert scaled[name].ratio == pytest.approx(plain[name].ratio, abs=1e-7)
        assert scaled[name].parameters["rate"] * 1e6 == pytest.approx(plain[name].parameters["rate"], rel=1e-6)


def test_a_short_tail_is_nan_with_a_named_reason():
    x = np.array([1.0, 2.0])
    with pytest.warns(UserWarning, match="the tail has 2 eigenvalues, a comparison needs 3"):
        found = alternatives(x, fit_tail(x))
    assert all(
        math.isnan(alternative.ratio) and math.isnan(alternative.p) and alternative.reason
        for alternative in found.values()
    )


def test_equal_tails_do_not_divide_by_zero():
    x = np.array([1.0, 4.0, 4.0, 4.0])
    assert all(
        math.isfinite(alternative.ratio) and 0 <= alternative.p <= 1
        for alternative in alternatives(x, fit_from(x)).values()
    )


def test_a_cut_off_is_found():
    rng = np.random.default_rng(0)
    drawn = 1 + rng.pareto(0.5, 4000)
    x = drawn[rng.random(4000) < np.exp(-drawn / 60)]  # α = 1.5 with e^{-x/60}, by rejection
    found = alternatives(x, fit_from(x))
    assert found["truncated"].parameters["alpha"] == pytest.approx(1.5, abs=0.1)
    assert found["truncated"].parameters["rate"] == pytest.approx(1 / 60, rel=0.2)
