"""The tail fit against the loop over all candidates, and against reference values computed once with other code."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.spectra import esd, fit_tail, p_value, scan_tail
from gramscope.spectra.tail import Tails, _replicates, require_convention
from references.spectra import tail_fit

REFERENCE = [
    ("normal", 0, (512, 512), 5.458687, 0.131351, 2.346558, 69, 3.230768),
    ("normal", 0, (1024, 512), 51.36082, 0.117372, 2.740102, 6, 23.817211),
    ("t3", 1, (512, 512), 4.416107, 0.069109, 6.684726, 68, 7.694437),
    ("t2", 1, (1024, 512), 2.424397, 0.040193, 10.503960, 173, 7.615478),
]


def matrix(law: str, seed: int, shape: tuple[int, int]) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    entries = rng.standard_normal(shape) if law == "normal" else rng.standard_t(int(law[1]), shape)
    return torch.from_numpy(entries / math.sqrt(shape[0]))


@pytest.mark.parametrize("convention", ["weightwatcher", "gramscope"])
@pytest.mark.parametrize(("law", "seed", "shape", "alpha", "D", "xmin", "n_tail", "alpha_hat"), REFERENCE)
def test_reference_values(law, seed, shape, alpha, D, xmin, n_tail, alpha_hat, convention):
    fit = fit_tail(esd(matrix(law, seed, shape)), convention=convention)
    # The table prints six or seven digits.
    assert fit.alpha == pytest.approx(alpha, abs=1e-5)
    assert pytest.approx(D, abs=1e-6) == fit.D
    assert fit.xmin == pytest.approx(xmin, abs=1e-6)
    assert fit.n_tail == n_tail
    assert fit.alpha_hat == pytest.approx(alpha_hat, abs=1e-5)
    assert fit.sigma == pytest.approx((alpha - 1) / math.sqrt(n_tail), rel=1e-5)


SPECTRA = st.one_of(
    st.lists(st.floats(1e-8, 1e8), min_size=2, max_size=60),
    st.lists(st.integers(0, 6).map(float), min_size=2, max_size=40),  # ties and zeros
    st.tuples(st.integers(0, 2**32 - 1), st.integers(20, 200), st.floats(0.3, 4.0)).map(
        lambda drawn: (np.random.default_rng(drawn[0]).pareto(drawn[2], drawn[1]) + 1).tolist()
    ),
)


@settings(max_examples=60, deadline=None)
@given(values=SPECTRA, convention=st.sampled_from(["gramscope", "weightwatcher"]))
def test_equals_the_loop_over_all_candidates(values, convention):
    x = np.array(values)
    cut, few = (1e-5, 20) if convention == "weightwatcher" else (x.max() * len(x) * np.finfo(float).eps, 0)
    reference = tail_fit(x, cut, few)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fit_tail(x, convention=convention)
    if math.isinf(reference["D"]):
        assert math.isnan(fit.alpha)
        assert fit.reason
        return
    # Both sum the same logarithms in another order; tails may tie to rounding, so D is compared first.
    assert pytest.approx(reference["D"], abs=1e-11) == fit.D
    same = scan_tail(x, convention=convention)
    alternatives = same.xmin[np.abs(same.D - reference["D"]) < 1e-11]
    assert fit.xmin in alternatives
    if len(alternatives) == 1:
        assert fit.alpha == pytest.approx(reference["alpha"], rel=1e-8)
        assert (fit.xmin, fit.n_tail) == (reference["xmin"], reference["n_tail"])
        assert fit.sigma == pytest.approx(reference["sigma"], rel=1e-8)


def test_the_scan_holds_what_the_fit_chose():
    values = esd(matrix("t3", 4, (150, 100)))
    fit, scan = fit_tail(values), scan_tail(values)
    best = int(np.argmin(scan.D))
    assert (scan.xmin[best], scan.alpha[best], scan.D[best]) == (fit.xmin, fit.alpha, fit.D)
    assert scan.n_tail[best] == fit.n_tail
    assert np.all(np.diff(scan.xmin) >= 0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), power=st.integers(-60, 60))
def test_alpha_does_not_depend_on_the_scale(seed, power):
    x = np.random.default_rng(seed).pareto(1.5, 80)
    plain, scaled = fit_tail(x), fit_tail(x * 2.0**power)
    assert scaled.alpha == pytest.approx(plain.alpha, rel=1e-12)
    assert scaled.n_tail == plain.n_tail


def test_the_weightwatcher_convention_depends_on_it():
    """The fault that the relative cut mends; feeds the test above a convention that would fail it."""
    x = np.random.default_rng(0).pareto(1.5, 80)
    assert fit_tail(x * 1e-4, convention="weightwatcher").n < fit_tail(x, convention="weightwatcher").n


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "there are no eigenvalues"),
        ([0.0, 0.0], "all eigenvalues are zero"),
        ([3.0], "1 of 1 eigenvalues are above the cut, a tail needs 2"),
        ([0.0, 0.0, 5.0], "1 of 3 eigenvalues"),
        ([2.0, 2.0, 2.0], "all equal"),
    ],
)
def test_no_tail_is_nan_with_a_named_reason(values, reason):
    with pytest.warns(UserWarning, match="alpha is NaN"):
        fit = fit_tail(values)
    assert math.isnan(fit.alpha)
    assert math.isnan(fit.D)
    assert math.isnan(fit.xmin)
    assert math.isnan(fit.sigma)
    assert fit.n_tail == 0
    assert reason in fit.reason


@pytest.mark.parametrize("bad", [[1.0, math.nan], [1.0, math.inf], [-1.0, 2.0], [[1.0, 2.0]], 3.0])
def test_what_is_no_spectrum_is_refused(bad):
    with pytest.raises(InputError, match="fit_tail needs"):
        fit_tail(np.array(bad))


def test_options_are_checked():
    with pytest.raises(InputError, match="convention must be one of"):
        # Under pytest the annotation itself refuses it first, with another error.
        inspect.unwrap(require_convention)("mine")
    with pytest.raises(InputError, match="min_tail"):
        fit_tail([1.0, 2.0], min_tail=1)
    with pytest.raises(InputError, match="replicates"):
        p_value([1.0, 2.0, 4.0], replicates=0)


def test_any_dtype_and_order_of_eigenvalues():
    x = torch.from_numpy(np.random.default_rng(3).pareto(2.0, 64) + 0.5)
    fit = fit_tail(x)
    assert fit_tail(x.flip(0)) == fit
    assert fit_tail(x.tolist()) == fit
    assert fit_tail(torch.stack([x, x], 1)[:, 0]) == fit
    # bfloat16 keeps three digits of λ.
    assert fit_tail(x.bfloat16()).alpha == pytest.approx(fit.alpha, rel=0.2)


def test_p_value_is_flat_for_true_power_laws_and_small_for_others():
    rng = np.random.default_rng(5)
    true = [p_value(rng.pareto(1.5, 120) + 1, replicates=39, seed=k) for k in range(30)]
    assert 0.3 < np.mean(true) < 0.75
    assert sum(p <= 0.1 for p in true) <= 9  # binomial(30, 0.1): 9 or more has probability 2e-3
    false = [p_value(rng.random(200) + 1, replicates=39, seed=k) for k in range(5)]
    assert max(false) <= 0.1


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 90),
    exponent=st.floats(0.2, 4.0),
    ties=st.booleans(),
    convention=st.sampled_from(["gramscope", "weightwatcher"]),
)
def test_which_spectra_reach_below_a_distance(seed, n, exponent, ties, convention):
    """The bootstrap's question, asked of many spectra at once, against the loop over all candidates of each."""
    drawn = np.random.default_rng(seed).pareto(exponent, (7, n)) + (seed % 2)
    spectra = np.sort(np.minimum(np.ceil(drawn) if ties else drawn, 1e12), axis=1)
    least = []
    for x in spectra:
        cut, few = (1e-5, 20) if convention == "weightwatcher" else (x.max() * n * np.finfo(float).eps, 0)
        least.append(tail_fit(x, cut, few)["D"])
    tails = Tails.of(spectra, convention, 2)
    for limit in [*(d * (1 + e) for d in least if math.isfinite(d) for e in (-1e-9, 1e-9)), 0.0, 2.0]:
        assert tails.reach_below(limit).tolist() == [d < limit for d in least]


def test_replicates_keep_the_body_of_the_spectrum():
    """Below xmin they are eigenvalues of the spectrum itself, in its own share; above, draws of the law."""
    rng = np.random.default_rng(0)
    x = np.sort(np.concatenate([rng.uniform(0.1, 0.9, 400), rng.pareto(2.0, 100) + 1]))
    fit = fit_tail(x)
    below = x[x < fit.xmin]
    assert below.size > 300
    drawn = _replicates(below, fit, 60, np.random.default_rng(1))
    body = drawn[drawn < fit.xmin]
    assert np.isin(body, below).all()
    # Binomial: 60 · 500 draws put the share within five standard errors, 0.011.
    assert body.size / drawn.size == pytest.approx(1 - fit.n_tail / fit.n, abs=0.012)
    assert np.mean(np.log(drawn[drawn >= fit.xmin] / fit.xmin)) == pytest.approx(1 / (fit.alpha - 1), rel=0.08)


def test_p_value_follows_its_seed_and_no_global_stream():
    x = np.random.default_rng(0).pareto(1.5, 100) + np.random.default_rng(1).random(100)
    state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first, again, other = (
        p_value(x, seed=1),
        p_value(x, seed=1),
        [p_value(x, seed=s, replicates=99) for s in range(2, 6)],
    )
    assert first == again
    assert len(set(other)) > 1
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_alpha_of_noise_is_wild():
    """Known: median 9.96 and 5-95 % 5.7-23.5 over 40 Gaussian draws. Samples of 40 scatter; this is one of them."""
    rng = np.random.default_rng(0)
    alphas = [fit_tail(esd(torch.from_numpy(rng.standard_normal((256, 256)) / 16))).alpha for _ in range(40)]
    assert 5 < np.median(alphas) < 15
    assert np.quantile(alphas, 0.95) > 2 * np.quantile(alphas, 0.05)
