"""Intervals cover what they say, from four products on, whatever the spectrum; and nothing is surer than rounding."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from gramscope.base.errors import InputError
from gramscope.linalg import (
    Dense,
    Diagonal,
    Identity,
    LowRank,
    hutchinson,
    hutchpp,
    one_sided_trace,
    xtrace,
)
from gramscope.linalg.intervals import half_widths
from gramscope.propagators.measures import alignment, participation_ratio
from linalg.operator_cases import matrix, with_spectrum

F64 = torch.float64
METHODS = [hutchinson, hutchpp, xtrace]
SEEDS = 200
# Of 200 intervals at 95 %, 180 or more hold but for one time in 1,300.
ENOUGH = 180
PLACES = torch.arange(1, 61, dtype=F64)
SPECTRA = {
    "power law": PLACES**-1.5,
    "flat": torch.linspace(1, 2, 60, dtype=F64),
    "spike": torch.where(PLACES == 1, 100.0, 1.0).double(),
    "rank one": torch.where(PLACES == 1, 1.0, 0.0).double(),
    "indefinite": torch.linspace(-1, 1, 60, dtype=F64),
    "spike on a negative bulk": torch.where(PLACES == 1, 1.0, -0.01).double(),
}


def covered(estimates, exact) -> int:
    return sum(low <= exact <= high for low, high in (estimate.interval() for estimate in estimates))


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("method", "products"), [(hutchinson, 4), (xtrace, 4), *product(METHODS, (6, 12, 40))])
def test_traces_are_covered(method, products, spectrum):
    op = with_spectrum(SPECTRA[spectrum])
    estimates = [method(op, products, seed=seed) for seed in range(SEEDS)]
    assert covered(estimates, float(SPECTRA[spectrum].sum())) >= ENOUGH


@pytest.mark.parametrize("products", [4, 6, 12, 40])
@pytest.mark.parametrize("spectrum", ["power law", "flat"])
def test_numbers_made_of_traces_are_covered(spectrum, products):
    values = SPECTRA[spectrum]
    op, other = with_spectrum(values), with_spectrum(values, seed=7)
    mixed = Dense(op.matrix + other.matrix / 20, symmetric=True)
    root = Dense(op.matrix @ torch.diag(PLACES))
    cosine = float((op.matrix * mixed.matrix).sum() / op.matrix.norm() / mixed.matrix.norm())
    rank = values.sum() ** 2 / (values @ values)
    found = {
        "rank": ([participation_ratio(op, products=products, seed=s) for s in range(SEEDS)], rank),
        "alignment": ([alignment(op, mixed, products=products, seed=s) for s in range(SEEDS)], cosine),
        "one-sided": ([one_sided_trace(root, products, seed=s) for s in range(SEEDS)], root.matrix.square().sum()),
    }
    for name, (estimates, exact) in found.items():
        assert covered(estimates, float(exact)) >= ENOUGH, name


@pytest.mark.parametrize("level", [0.68, 0.95, 0.99])
@pytest.mark.parametrize("samples", [2, 4, 12, 100])
def test_half_widths_are_those_of_squares_of_normal_numbers(level, samples):
    squares = np.random.default_rng(5).standard_normal((100_000, samples)) ** 2
    off = np.abs(squares.mean(1) - 1) / (squares.std(1, ddof=1) / samples**0.5)
    # The share beyond the quantile, known to 0.0016 at most from 100,000 draws and as many or more of ours.
    assert np.mean(off <= half_widths(level, samples)) == pytest.approx(level, abs=0.008)
    assert half_widths(level, samples) > student.ppf((1 + level) / 2, samples - 1), "wider than for normal samples"


def test_few_products_do_not_look_surer_than_many():
    widths = [half_widths(0.95, samples) for samples in (2, 3, 4, 6, 12, 24, 100, 1000)]
    assert widths == sorted(widths, reverse=True)
    assert half_widths(0.95, 10**6) == widths[-1] == pytest.approx(1.96, rel=0.03)
    assert half_widths(0.68, 50) < half_widths(0.95, 50) < half_widths(0.99, 50)
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(InputError, match="level must lie between 0 and 1"):
            half_widths(level, 10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("n", [20, 300])
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("method", [hutchpp, xtrace])
def test_low_rank_is_no_surer_than_rounding(method, rank, n, dtype):
    """The samples of what is left are all zero to rounding; the trace on the range is still a rounded sum."""
    outside = 0
    for seed in range(40):
        factor = matrix(n, rank, dtype, seed=seed)
        exact = float(factor.double().square().sum())
        estimate = method(LowRank(factor), 18, seed=seed)
        assert estimate.standard_error < 1e3 * n**0.5 * torch.finfo(dtype).eps * exact, "rounding, and no more"
        outside += abs(estimate.value - exact) > 2 * estimate.standard_error
    assert outside <= 4


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("method", [hutchinson, one_sided_trace])
def test_equal_samples_are_no_surer_than_rounding(method, dtype):
    """Random signs on a diagonal: every sample is the trace."""
    for seed in range(20):
        entries = matrix(50, 1, F64, seed=seed)[:, 0].abs().to(dtype)
        estimate = method(Diagonal(entries), 6, seed=seed)
        wide = entries.double()
        exact = float(wide.sum() if method is hutchinson else wide.square().sum())
        assert abs(estimate.value - exact) <= 2 * estimate.standard_error < 1e3 * torch.finfo(dtype).eps * exact


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_ratios_are_no_surer_than_rounding(dtype):
    for seed in range(20):
        one = matrix(30, 30, dtype, seed=seed)
        aligned = alignment(Dense(one), Dense(3.3 * one), products=5, seed=seed)
        full = participation_ratio(Diagonal(torch.full((30,), 1 / 3, dtype=dtype)), products=5, seed=seed)
        for estimate, exact in ((aligned, 1), (full, 30)):
            assert abs(estimate.value - exact) <= 2 * estimate.standard_error < 1e2 * torch.finfo(dtype).eps * exact


def test_a_range_that_holds_everything_leaves_no_samples():
    whole = hutchpp(Identity(3, dtype=F64), 30, distribution="gaussian")
    assert whole.samples == 0, "all of it lies in the range that was found"
    assert whole.interval() == pytest.approx((3, 3), abs=1e-12)
