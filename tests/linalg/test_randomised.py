"""Randomised SVD, one-sided traces and adaptive estimates against dense answers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.linalg import (
    Dense,
    hutchinson,
    hutchpp,
    one_sided_trace,
    one_sided_trace_to,
    randomised_svd,
    trace_to,
    xtrace,
)
from gramscope.linalg.randomised import _residuals


def decaying(rows: int, cols: int, power: float, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    small = min(rows, cols)
    u = torch.linalg.qr(torch.randn(rows, small, generator=rng, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(cols, small, generator=rng, dtype=torch.float64)).Q
    return u * torch.arange(1, small + 1, dtype=torch.float64) ** -power @ v.mT


@settings(max_examples=15, deadline=None)
@given(st.integers(4, 30), st.integers(4, 30), st.integers(0, 100))
def test_full_width_svd_is_exact(rows, cols, seed):
    # As many random columns as the smaller side span everything: only rounding is left.
    matrix = decaying(rows, cols, 1.0, seed)
    k = min(rows, cols)
    found = randomised_svd(Dense(matrix), k, seed=seed, oversample=0)
    exact = torch.linalg.svdvals(matrix)
    assert torch.allclose(found.values, exact, atol=1e-12)
    assert found.all_converged
    rebuilt = found.left * found.values @ found.right.mT
    assert float((rebuilt - matrix).norm()) < 1e-12 * float(matrix.norm()) * 10


def test_flat_spectrum_reads_low_and_says_so():
    matrix = decaying(400, 300, 0.1, 0)
    exact = torch.linalg.svdvals(matrix)[:10]
    rough = randomised_svd(Dense(matrix), 10, power_steps=1)
    assert not rough.all_converged
    assert float((rough.values / exact).min()) < 0.97  # low by more than 3 %
    errors = [float((exact - randomised_svd(Dense(matrix), 10, power_steps=q).values).norm()) for q in (0, 1, 3, 8)]
    assert errors == sorted(errors, reverse=True)


def test_more_power_steps_until_converged():
    matrix = decaying(120, 90, 0.5, 1)
    found = randomised_svd(Dense(matrix), 5, power_steps=1, max_power_steps=60, tol=1e-6)
    assert found.all_converged
    assert found.power_steps > 1
    # Singular values are accurate to the square of the residual over the gap; here better than the residual itself.
    assert float((found.values - torch.linalg.svdvals(matrix)[:5]).abs().max()) < 1e-6


def test_residuals_are_those_of_both_sides():
    """Triplets that fit on one side only: the other side's residual is all there is to tell."""
    matrix = decaying(9, 6, 0.5, 5)
    rng = torch.Generator().manual_seed(6)
    u, v = (torch.randn(n, 2, generator=rng, dtype=torch.float64) for n in matrix.shape)
    u, v = u / u.norm(dim=0), v / v.norm(dim=0)
    image, pulled = matrix @ v, matrix.mT @ u
    forward = image.norm(dim=0), image / image.norm(dim=0)  # A v = σ u
    backward = pulled.norm(dim=0), pulled / pulled.norm(dim=0)  # Aᵀ u = σ v
    for left, values, right in ((forward[1], forward[0], v), (u, backward[0], backward[1]), (u, forward[0], v)):
        miss = (matrix @ right - left * values).square().sum(dim=0)
        miss = miss + (matrix.mT @ left - right * values).square().sum(dim=0)
        assert float(miss.min()) > 1e-3
        torch.testing.assert_close(_residuals(Dense(matrix), left, values, right), miss.sqrt())
    found = randomised_svd(Dense(matrix), 2, power_steps=0, oversample=0)
    miss = (matrix @ found.right - found.left * found.values).square().sum(dim=0)
    miss = miss + (matrix.mT @ found.left - found.right * found.values).square().sum(dim=0)
    torch.testing.assert_close(found.residuals, miss.sqrt())


def test_low_rank_gives_zeros():
    column = torch.ones(12, 1, dtype=torch.float64)
    found = randomised_svd(Dense(column @ column.mT), 3)
    assert torch.allclose(found.values, torch.tensor([12.0, 0.0, 0.0], dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "cols", "rank", "k"), [(12, 9, 2, 9), (9, 12, 1, 4), (5, 5, 4, 5), (7, 6, 0, 3)])
def test_vectors_beyond_the_rank_are_orthonormal(rows, cols, rank, k, dtype):
    matrix = decaying(rows, cols, 0.5, 7)[:, :rank] @ decaying(rank, cols, 0.5, 8) if rank else torch.zeros(rows, cols)
    matrix = matrix.to(dtype)
    found = randomised_svd(Dense(matrix), k)
    tol = 1e-12 if dtype == torch.float64 else 1e-5
    for vectors in (found.left, found.right):
        assert vectors.dtype == dtype
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(k, dtype=dtype), rtol=0, atol=tol)
    torch.testing.assert_close(found.values, torch.linalg.svdvals(matrix.double())[:k], rtol=tol, atol=tol)
    torch.testing.assert_close(matrix @ found.right, found.left * found.values.to(dtype), rtol=0, atol=tol)
    assert found.all_converged


@pytest.mark.parametrize("side", ["reverse", "forward"])
def test_one_sided_trace_is_unbiased_with_an_honest_error(side):
    matrix = decaying(30, 50, 0.3, 2)
    exact = float((matrix**2).sum())
    runs = [one_sided_trace(Dense(matrix), 20, side=side, seed=seed) for seed in range(200)]
    values = torch.tensor([run.value for run in runs])
    spread = float(values.std())
    # The mean of 200 unbiased values lies within 4 of its standard errors (odds of a miss 1 in 16,000).
    assert abs(float(values.mean()) - exact) < 4 * spread / 200**0.5
    claimed = float(torch.tensor([run.standard_error for run in runs]).mean())
    assert 0.8 < claimed / spread < 1.2
    assert (runs[0].dtype, runs[0].device.type, runs[0].products) == (torch.float64, "cpu", 20)


def test_a_longer_run_begins_with_the_shorter_one():
    op = Dense(decaying(20, 20, 0.5, 3))
    a = one_sided_trace(op, 10, block=3)
    b = one_sided_trace(op, 10, block=64)
    assert abs(a.value - b.value) < 1e-12


def test_adaptive_estimates_meet_their_tolerance_or_say_so():
    matrix = decaying(60, 60, 0.5, 4)
    op, gram = Dense(matrix), Dense(matrix @ matrix.mT, symmetric=True)
    exact = float((matrix**2).sum())
    good = one_sided_trace_to(op, 0.02, most=20000)
    assert good.converged
    assert good.relative_error <= 0.02
    assert abs(good.value / exact - 1) < 0.1
    poor = one_sided_trace_to(op, 1e-6, most=32)
    assert poor.converged is False
    assert poor.products == 32
    assert "NOT converged" in str(poor)
    for method in (hutchinson, hutchpp, xtrace):
        found = trace_to(gram, 0.02, method)
        assert found.converged
        assert abs(found.value / exact - 1) < 0.1
    assert trace_to(gram, 1e-9, hutchinson, most=24).converged is False


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_bad_tolerances_are_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must be positive"):
        one_sided_trace_to(Dense(torch.eye(3)), tolerance)
    with pytest.raises(ValueError, match="tolerance must be positive"):
        trace_to(Dense(torch.eye(3)), tolerance, hutchinson)
    with pytest.raises(ValueError, match="k must be between"):
        randomised_svd(Dense(torch.eye(3)), 4)
