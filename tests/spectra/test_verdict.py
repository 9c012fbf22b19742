"""A power law is claimed only where the bootstrap, the alternatives and the shuffled weight allow it."""

import math

import numpy as np
import pytest
import torch

from gramscope.linalg import LowRank
from gramscope.spectra import (
    ShuffledNull,
    TailFit,
    alternatives,
    analyze,
    esd,
    fit_tail,
    p_value,
    shuffled_null,
    verdict,
)

CLAIMS = {"power law", "truncated power law"}


def gaussian(rng, rows, cols):
    return rng.standard_normal((rows, cols))


def heavy_entries(rng, rows, cols):
    """Independent entries of infinite variance: the spectrum has a power law in whatever order they stand."""
    return rng.standard_t(1.5, (rows, cols))


def spiked(rng, rows, cols, rank=10):
    left, right = (np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in (rows, cols))
    return gaussian(rng, rows, cols) + (left * np.linspace(1.2, 4, rank) * (rows**0.5 + cols**0.5)) @ right.T


def heavy_tail(rng, rows, cols, alpha=2.5):
    """Random singular vectors, and λ drawn from a power law: the entries are next to Gaussian, the order is all."""
    rank = min(rows, cols)
    left, right = (np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in (rows, cols))
    return (left * (1 - rng.random(rank)) ** (-0.5 / (alpha - 1))) @ right.T


def drawn(make, seed, rows=192, cols=160):
    return torch.from_numpy(make(np.random.default_rng(seed), rows, cols))


def verdicts(make, seeds=12, **options):
    weights = {str(seed): drawn(make, seed) for seed in range(seeds)}
    return analyze(weights, **options).set_index("name")


@pytest.mark.parametrize("make", [gaussian, spiked])
def test_noise_and_spikes_are_no_power_law(make):
    assert not CLAIMS & set(verdicts(make)["verdict"])


def test_what_the_shuffled_weight_has_as_well_is_not_called_a_power_law():
    """Nearly every draw passes bootstrap and alternatives; the shuffled weight has the same α.

    Chance puts a weight beyond all ten shuffles in both α and λ_max once in 11 draws at most.
    """
    rows = verdicts(heavy_entries)
    compared = rows[rows["shuffled_alpha"].notna()]
    assert len(compared) >= 6
    assert np.abs(compared["alpha"] - compared["shuffled_alpha"]).median() < 0.3
    assert rows["verdict"].isin(CLAIMS).sum() <= 1
    assert (rows["verdict"] == "no heavier than shuffled").sum() >= len(compared) - 1


def test_a_true_heavy_tail_is_called_a_power_law():
    """p of the bootstrap is uniform under the law, so one in ten is lost to it, and none to the null."""
    rows = verdicts(heavy_tail)
    assert rows["verdict"].isin(CLAIMS).sum() >= 9
    claimed = rows[rows["verdict"].isin(CLAIMS)]
    assert (claimed["alpha"] < claimed["shuffled_alpha"]).all()
    assert (claimed["shuffled_p"] < 0.1).all()


@pytest.mark.parametrize("make", [heavy_entries, heavy_tail])
def test_without_a_null_nothing_is_claimed(make):
    assert not CLAIMS & set(verdicts(make, shuffles=0)["verdict"])
    weight = drawn(heavy_tail, 0)
    assert analyze({"kernel": LowRank(weight)})["verdict"].tolist() == ["undecided"], "no entries to shuffle"


def test_the_weights_whose_verdict_needs_no_null_say_so():
    frame = analyze({"noise": drawn(gaussian, 0), "tail": drawn(heavy_tail, 0)}).set_index("name")
    assert frame.loc["tail", "reason"] == ""
    assert frame.loc["tail", "shuffled_alpha"] > 0
    assert math.isnan(frame.loc["noise", "shuffled_alpha"])
    assert "the verdict does not need it" in frame.loc["noise", "reason"]
    asked = analyze({"noise": drawn(gaussian, 0)}, shuffles=3)
    assert asked["shuffled_alpha"][0] > 0
    assert asked["reason"][0] == ""
    assert "shuffled_alpha" not in analyze({"noise": drawn(gaussian, 0)}, shuffles=0)


def evidence(alpha=2.5, n=600, seed=1):
    """A clean power law: everything speaks for it but the null, which the tests choose."""
    x = (1 - np.random.default_rng(seed).random(n)) ** (-1 / (alpha - 1))
    fit = fit_tail(x, min_tail=n // 2)
    return fit, alternatives(x, fit), 0.9


def null_of(alphas, p) -> ShuffledNull:
    shuffles = len(alphas)
    nothing = np.zeros((shuffles, 0))
    return ShuffledNull(
        nothing, np.array(alphas, dtype=float), np.ones(shuffles), np.zeros(shuffles, dtype=np.int64), 0.0, p
    )


@pytest.mark.parametrize(
    ("alphas", "p", "expected"),
    [
        ([9.6] * 10, 1 / 11, "power law"),
        ([math.nan] * 10, 1 / 11, "power law"),  # the shuffled weight has no tail at all
        ([9.6] * 10, 2 / 11, "no heavier than shuffled"),  # a shuffle reaches λ_max
        ([9.6] * 9 + [2.0], 1 / 11, "no heavier than shuffled"),  # a shuffle reaches α
        ([2.4] * 10, 1 / 11, "no heavier than shuffled"),
        ([9.6] * 5, 1 / 6, "undecided"),  # heavier than all, but five are too few for the level 0.1
        ([2.0] * 5, 1 / 6, "no heavier than shuffled"),
    ],
)
def test_the_null_is_asked(alphas, p, expected):
    fit, against, bootstrap = evidence()
    assert 2.3 < fit.alpha < 2.7
    assert verdict(fit, against, bootstrap, null_of(alphas, p)) == expected


def test_an_exponent_of_ten_beside_a_null_of_ten():
    fit, against, bootstrap = evidence(alpha=10.7)
    null = null_of([9.6, 8.1, 12.0, 9.9, 10.4, 7.7, 9.1, 11.2, 9.6, 9.4], 1 / 11)
    assert verdict(fit, against, bootstrap, null) == "no heavier than shuffled"


def test_each_piece_of_evidence_is_needed():
    fit, against, bootstrap = evidence()
    null = null_of([9.6] * 10, 1 / 11)
    assert verdict(fit, against, bootstrap, null) == "power law"
    assert verdict(fit, against, bootstrap) == "undecided"
    assert verdict(fit, against, None, null) == "undecided"
    assert verdict(fit, against, 0.05, null) == "no power law"
    few, against_few, _ = evidence(n=40)
    assert verdict(few, against_few, 0.9, null) == "undecided"


@pytest.mark.parametrize("kind", ["exponential", "narrow"])
def test_other_laws_are_ruled_out_whatever_the_null(kind):
    rng = np.random.default_rng(1)
    x = 3 + rng.exponential(2.0, 600) if kind == "exponential" else 5 + rng.random(600)
    fit = fit_tail(x, min_tail=300)
    for null in (None, null_of([9.6] * 10, 1 / 11)):
        assert verdict(fit, alternatives(x, fit), p_value(x, min_tail=300), null) == "no power law"


def test_a_cut_off_is_named():
    rng = np.random.default_rng(0)
    values = 1 + rng.pareto(0.5, 4000)
    x = values[rng.random(4000) < np.exp(-values / 60)]  # α = 1.5 with e^{-x/60}, by rejection
    logs = np.log(x / x.min())
    alpha = 1 + len(x) / logs.sum()
    fit = TailFit(alpha, 0.0, float(x.min()), len(x), (alpha - 1) / math.sqrt(len(x)), float(x.max()), len(x))
    assert verdict(fit, alternatives(x, fit), 0.9, null_of([9.6] * 10, 1 / 11)) == "truncated power law"


def test_a_row_says_what_the_functions_say():
    weight = drawn(heavy_tail, 3)
    values = esd(weight)
    fit = fit_tail(values)
    frame = analyze({"w": weight}, shuffles=10)
    null = shuffled_null(weight, shuffles=10)
    against = alternatives(values, fit)
    assert frame["verdict"][0] == verdict(fit, against, float(frame["p_value"][0]), null) == "power law"
