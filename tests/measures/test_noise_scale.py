"""The gradient noise scale against gradients written out, and on average over draws."""

import pytest
import torch

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.measures.noise_scale import noise_and_signal


def sizes(gradients):
    return gradients.square().sum(1), float(gradients.mean(0).square().sum())


def test_of_gradients_written_out():
    gradients = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 2
    covariance = torch.cov(gradients.T)
    signal = gradients.mean(0).square().sum() - covariance.trace() / 6
    assert gs.measures.gradient_noise_scale(*sizes(gradients)) == pytest.approx(float(covariance.trace() / signal))


def test_numerator_and_denominator_are_unbiased():
    """With |G|² = 1, tr Σ = 4 and batches of 3 the plain estimates would be 4 · 2/3 and 1 + 4/3."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(20_000, 3, 4, dtype=torch.float64, generator=generator) + 0.5
    estimates = torch.tensor([noise_and_signal(*sizes(batch)) for batch in draws], dtype=torch.float64)
    mean, error = estimates.mean(0), estimates.std(0) / len(draws) ** 0.5
    assert ((mean - torch.tensor([4.0, 1.0])).abs() < 4 * error).all()
    assert float(error.max()) < 0.05


def test_one_gradient_has_no_noise_to_see():
    with pytest.raises(InputError, match="2 examples at least, got shape"):
        gs.measures.gradient_noise_scale(torch.ones(1), 1.0)
