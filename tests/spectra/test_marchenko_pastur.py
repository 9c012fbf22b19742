"""The Marchenko-Pastur fit on noise, on noise with planted spikes, and where it is undefined."""

import math

import numpy as np
import pytest
import torch

from gramscope.base.errors import InputError
from gramscope.spectra import fit_marchenko_pastur, marchenko_pastur_density
from gramscope.spectra.marchenko_pastur import quantiles
from references.spectra import marchenko_pastur_cdf

SHAPES = [(400, 400), (600, 200), (200, 600), (300, 299), (1000, 50)]


def noise(shape: tuple[int, int], sigma: float, seed: int, spikes: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = sigma * rng.standard_normal(shape)
    edge = sigma * (math.sqrt(shape[0]) + math.sqrt(shape[1]))
    left = np.linalg.qr(rng.standard_normal((shape[0], max(spikes, 1))))[0]
    right = np.linalg.qr(rng.standard_normal((shape[1], max(spikes, 1))))[0]
    return np.linalg.svd(weight + (2 * edge * left @ right.T if spikes else 0), compute_uv=False) ** 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spikes", [0, 4])
def test_noise_and_planted_spikes(shape, spikes):
    found = [fit_marchenko_pastur(noise(shape, 0.03, seed, spikes), shape) for seed in range(4)]
    # The threshold is a 99 % point: one false spike in four draws of five shapes is allowed, no more.
    assert sum(fit.spikes - spikes for fit in found) in (0, 1)
    assert np.mean([fit.sigma for fit in found]) == pytest.approx(0.03, rel=0.02)
    assert max(fit.D for fit in found) < 0.06
    for fit in found:
        assert 0 < fit.soft_rank < (1.15 if spikes == 0 else 0.5)
        root = math.sqrt(max(shape)), math.sqrt(min(shape))
        assert fit.edges == pytest.approx([fit.sigma**2 * (root[0] + s * root[1]) ** 2 for s in (-1, 1)], rel=1e-9)
        assert fit.threshold > fit.edges[1]


def test_sigma_scales_with_the_weight():
    values = noise((300, 120), 1.0, 0)
    plain, scaled = fit_marchenko_pastur(values, (300, 120)), fit_marchenko_pastur(1e-6 * values, (300, 120))
    assert scaled.sigma == pytest.approx(1e-3 * plain.sigma, rel=1e-12)
    assert (scaled.spikes, scaled.soft_rank, scaled.D) == pytest.approx((plain.spikes, plain.soft_rank, plain.D))


def test_a_learnt_spectrum_is_told_from_noise():
    values = np.geomspace(1e-3, 10, 300)
    # Noise of this size has D < 0.02.
    assert fit_marchenko_pastur(values, (300, 300)).D > 0.1


@pytest.mark.parametrize(("long", "short"), [(400, 400), (400, 100), (500, 499), (1000, 10)])
def test_quantiles_invert_the_distribution_function(long, short):
    for at, value in zip((np.arange(9) + 0.5) / 9, quantiles(short / long, 9), strict=True):
        # 4096 steps of the trapezium rule err by about 1e-7.
        assert marchenko_pastur_cdf(value * long, long, short, 1.0) == pytest.approx(at, abs=2e-6)


@pytest.mark.parametrize("shape", [(60, 60), (90, 30), (30, 90)])
def test_density_is_the_derivative_of_the_distribution(shape):
    long, short = max(shape), min(shape)
    middle = 0.8 * (long + short)
    slope = (
        marchenko_pastur_cdf(middle + 0.05, long, short, 1.3) - marchenko_pastur_cdf(middle - 0.05, long, short, 1.3)
    ) / 0.1
    assert float(marchenko_pastur_density([middle], shape, 1.3)[0]) == pytest.approx(slope, rel=1e-4)
    outside = [0.0, -1.0, 2 * 1.3**2 * (math.sqrt(long) + math.sqrt(short)) ** 2]
    assert marchenko_pastur_density(outside, shape, 1.3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "shape", "reason"),
    [
        (np.ones(1), (1, 5), "one row or column"),
        (np.arange(1.0, 6.0), (5, 5), "5 eigenvalues, a bulk needs 8"),
        (np.r_[np.zeros(20), np.ones(10)], (30, 30), "half of the eigenvalues or more are zero"),
    ],
)
@pytest.mark.parametrize("convention", ["gramscope", "weightwatcher"])
def test_undefined_is_nan_with_a_named_reason(values, shape, reason, convention):
    with pytest.warns(UserWarning, match=reason):
        found = fit_marchenko_pastur(values, shape, convention)
    assert math.isnan(found.sigma)
    assert math.isnan(found.soft_rank)
    assert reason in found.reason


def test_a_shape_that_is_none_is_refused():
    with pytest.raises(InputError, match="shape must be"):
        fit_marchenko_pastur(np.ones(9), (0, 9))


@pytest.mark.parametrize("rank", [1, 8, 16, 20])
def test_rounding_is_no_bulk(rank):
    """A product of thin factors has eigenvalues that are rounding of λ_max: no noise, and no more spikes than rank."""
    rng = np.random.default_rng(rank)
    weight = rng.standard_normal((64, rank)) @ rng.standard_normal((rank, 32))
    values = np.linalg.svd(weight, compute_uv=False) ** 2
    if rank > 16:
        assert fit_marchenko_pastur(values, weight.shape).spikes <= rank
        return
    with pytest.warns(UserWarning, match="half of the eigenvalues"):
        found = fit_marchenko_pastur(values, weight.shape)
    assert found.spikes == 0
    assert math.isnan(found.sigma)
    assert fit_marchenko_pastur(values, weight.shape, "weightwatcher").reason is None


def test_exactly_half_zero_is_no_bulk():
    with pytest.warns(UserWarning, match="half of the eigenvalues or more are zero"):
        assert math.isnan(fit_marchenko_pastur([0.0] * 10 + [1.0] * 10, (30, 20)).sigma)


def test_density_takes_tensors_and_needs_a_width():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert marchenko_pastur_density(x, (4, 3)).tolist() == marchenko_pastur_density([1.0, 2.0], (4, 3)).tolist()
    for sigma in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="sigma must be one finite number greater than 0"):
            marchenko_pastur_density(x, (4, 3), sigma)
