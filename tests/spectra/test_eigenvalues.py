"""λ of weights and operators against an SVD: shapes, dtypes, layouts, and what is refused."""

import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.user_warnings import UndefinedMeasureWarning
from gramscope.linalg import Dense, Diagonal, LowRank
from gramscope.spectra import analyze, esd, fit_tail, log_alpha_norm, ranks, shuffled_null, spectrum, stable_rank
from gramscope.spectra import eigenvalues as module
from references.spectra import entropy, squared_singular_values


@pytest.fixture
def as_users_run_it():
    # The tests' type checker would refuse wrong kinds before our own words do.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def assert_same_spectrum(found: torch.Tensor, expected: np.ndarray) -> None:
    """To rounding of the greatest: a Gram matrix resolves λ to about n ε λ_max."""
    assert found.dtype == torch.float64
    assert len(found) == len(expected)
    scale = float(expected.max()) if expected.size else 1.0
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13 * max(scale, 1e-300))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    rank=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "transposed", "strided", "requires_grad"]),
    seed=st.integers(0, 10_000),
)
def test_any_weight(rows, cols, rank, dtype, layout, seed):
    rng = torch.Generator().manual_seed(seed)
    rank = min(rank, rows, cols)
    weight = torch.randn(rows, rank, generator=rng) @ torch.randn(rank, cols, generator=rng)
    weight = weight.to(dtype)
    if layout == "transposed":
        weight = weight.mT.contiguous().mT
    elif layout == "strided":
        weight = torch.stack([weight, weight], dim=-1)[..., 0]
    elif layout == "requires_grad":
        weight = weight.requires_grad_()
    before = weight.detach().clone()
    assert_same_spectrum(esd(weight), squared_singular_values(weight))
    assert torch.equal(weight, before)
    assert not esd(weight).requires_grad


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 4, 5, 7), (6, 1, 1), (1, 9, 2), (5, 1, 8)])
def test_stacks_are_pooled(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    each = [squared_singular_values(matrix) for matrix in weight.reshape(-1, *shape[-2:])]
    assert_same_spectrum(esd(weight), np.sort(np.concatenate(each)))


@pytest.mark.parametrize("shape", [(500, 30), (30, 500), (4, 200, 20)])
def test_blocks_change_nothing(shape, monkeypatch):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = esd(weight)
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 1000)
    assert_same_spectrum(esd(weight), whole.numpy())


def test_small_eigenvalues_are_those_of_float64():
    """A float32 Gram matrix errs by 20 % on the smallest values."""
    weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(2))
    exact = squared_singular_values(weight)
    assert abs(float(esd(weight)[0]) / exact[0] - 1) < 1e-6
    coarse = torch.linalg.eigvalsh(weight.mT @ weight)
    assert abs(float(coarse[0]) / exact[0] - 1) > 1e-3


def test_empty_and_odd_inputs():
    assert esd(torch.zeros(0, 5)).tolist() == []
    assert esd(torch.zeros(3, 5)).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(InputError, match="must have shape"):
        esd(torch.ones(5))
    with pytest.raises(UnsupportedError, match="meta"):
        esd(torch.empty(4, 4, device="meta"))
    with pytest.raises(InputError, match="2 of 12 entries are NaN or infinite"):
        esd(torch.tensor([[math.nan, 1, 2, 3], [0, 1, 2, math.inf], [0, 1, 2, 3]]))
    with pytest.raises(InputError, match="overflow float64"):
        esd(torch.full((2, 2), 1e200, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_operators(dtype):
    factor = torch.randn(30, 12, dtype=dtype, generator=torch.Generator().manual_seed(3))
    operator = LowRank(factor) + Diagonal(torch.full((30,), 0.5, dtype=dtype))
    expected = np.linalg.eigvalsh((factor @ factor.mT).double().numpy()) + 0.5
    tol = 1e-4 if dtype == torch.float32 else 1e-11
    np.testing.assert_allclose(spectrum(operator).numpy(), expected, atol=tol)
    np.testing.assert_allclose(spectrum(operator.dense()).numpy(), expected, atol=tol)
    assert fit_tail(spectrum(operator)).n == 30


def test_a_pullback_metric():
    """M = Wᵀ P W with a co-activation projector P, as operator and as the spectrum of D W."""
    rng = torch.Generator().manual_seed(4)
    weight = torch.randn(40, 25, dtype=torch.float64, generator=rng)
    mask = (torch.rand(40, generator=rng) > 0.4).double()
    W = Dense(weight)
    metric = W.T @ Diagonal(mask) @ W
    assert_same_spectrum(spectrum(metric), squared_singular_values(mask[:, None] * weight))
    assert fit_tail(spectrum(metric)).alpha == pytest.approx(fit_tail(esd(mask[:, None] * weight)).alpha, rel=1e-9)


def test_operators_that_are_refused():
    with pytest.raises(InputError, match="symmetric operator"):
        spectrum(Dense(torch.randn(4, 4)))
    with pytest.raises(InputError, match="differs from its transpose"):
        spectrum(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(InputError, match="finite"):
        spectrum(torch.full((2, 2), math.nan))
    with pytest.raises(InputError, match=r"e\.g\. values\[values > 0\]"):
        fit_tail(spectrum(torch.diag(torch.tensor([-1.0, 2.0, 3.0]))))


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(0, 1e6).filter(lambda v: v == 0 or v > 1e-3), min_size=3, max_size=50))
def test_ranks_from_their_formulas(values):
    x = np.sort(np.array(values))
    x[-2:] += 1.0  # two eigenvalues at least, or the entropy is undefined
    found = ranks(x)
    rank = int((x > x.max() * len(x) * np.finfo(float).eps).sum())
    assert found.rank == rank
    assert found.stable_rank == pytest.approx(x.sum() / x.max(), rel=1e-12)
    assert found.participation == pytest.approx(x.sum() ** 2 / (x**2).sum(), rel=1e-12)
    assert found.entropy == pytest.approx(entropy(x, rank), rel=1e-9)
    assert found.log_norm == pytest.approx(math.log10(x.sum()), abs=1e-12)
    assert 1 <= found.stable_rank <= len(x) * (1 + 1e-12)
    assert log_alpha_norm(x, 2.5) == pytest.approx(math.log10((x**2.5).sum()), abs=1e-9)


def test_undefined_ranks_say_why():
    with pytest.warns(UserWarning, match="stable_rank.* NaN: all eigenvalues are zero"):
        assert math.isnan(stable_rank([0.0, 0.0]))
    with pytest.warns(UserWarning, match="entropy is NaN: the rank is 1"):
        assert math.isnan(ranks([0.0, 3.0]).entropy)
    with pytest.warns(UserWarning, match="there are no eigenvalues"):
        assert ranks([]).rank == 0


def test_norms_that_overflow_in_the_open():
    assert log_alpha_norm([1e3, 1e9], 51.0) == pytest.approx(459.0, abs=1e-9)


def test_the_shuffled_null():
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn(60, 2, generator=rng) @ torch.randn(2, 40, generator=rng) + 0.1 * torch.randn(
        60, 40, generator=rng
    )
    before = weight.clone()
    state = torch.get_rng_state()
    null = shuffled_null(weight, shuffles=6, seed=3)
    assert torch.equal(weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    again = shuffled_null(weight, shuffles=6, seed=3)
    assert np.array_equal(null.eigenvalues, again.eigenvalues)
    assert not np.array_equal(null.eigenvalues, shuffled_null(weight, shuffles=6, seed=4).eigenvalues)
    # A shuffle keeps the entries, so Σλ; structure is gone, so λ_max falls.
    np.testing.assert_allclose(null.eigenvalues.sum(axis=1), float(esd(weight).sum()), rtol=1e-9)
    assert null.lambda_max.max() < float(esd(weight)[-1]) / 3
    assert null.p == pytest.approx(1 / 7)
    assert null.distance > 0.5
    assert null.traps.max() == 0
    flat = shuffled_null(torch.randn(60, 40, generator=rng), shuffles=6)
    assert flat.distance < 0.15


def test_traps_are_huge_entries():
    weight = 0.1 * torch.randn(80, 80, generator=torch.Generator().manual_seed(6))
    weight[3, 4] = 30.0
    assert shuffled_null(weight, shuffles=3).traps.min() >= 1


def test_squares_that_vanish_are_named():
    """λ of 1e-200 is 1e-400: not zero, and not a number of float64."""
    w = torch.randn(60, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for factor in (1e-200, 1e-160):
        with pytest.raises(InputError, match="whose squares vanish in float64"):
            esd(factor * w)
    row = analyze({"w": w * 1e-200}).iloc[0]
    assert "vanish in float64" in row["reason"]
    assert "zero" not in row["reason"]
    assert "all eigenvalues are zero" in analyze({"w": w * 0}).iloc[0]["reason"]
    assert ranks(esd(w * 2.0**-480)).stable_rank == pytest.approx(ranks(esd(w)).stable_rank, rel=1e-12)
    assert esd(w[:0]).tolist() == []


@pytest.mark.parametrize("values", [[0.0, 0.0], []])
def test_log_alpha_norm_says_why_it_is_nan(values):
    why = "all eigenvalues are zero" if values else "there are no eigenvalues"
    with pytest.warns(UndefinedMeasureWarning, match=f"log_alpha_norm is not defined: {why}"):
        assert math.isnan(log_alpha_norm(values, 2.0))
    with pytest.warns(UndefinedMeasureWarning, match="alpha is NaN"):
        assert math.isnan(log_alpha_norm([1.0, 2.0], math.nan))


def test_arrays_are_taken_like_tensors():
    w = np.random.default_rng(0).normal(size=(6, 4))
    assert torch.equal(esd(w), esd(torch.from_numpy(w)))
    assert torch.equal(esd(w[::-1].astype(np.float32)), esd(torch.from_numpy(w[::-1].astype(np.float32))))
    assert torch.equal(spectrum(w.T @ w), spectrum(torch.from_numpy(w.T @ w)))
    assert shuffled_null(w, shuffles=2).p == shuffled_null(torch.from_numpy(w), shuffles=2).p


@pytest.mark.parametrize("take", [esd, spectrum])
def test_what_is_no_matrix_of_numbers_is_refused(take, as_users_run_it):
    for wrong in ([[1.0, 2.0], [2.0, 1.0]], np.array([["a", "b"]]), "abc", None):
        with pytest.raises(InputError, match=r"must be a torch\.Tensor or a numpy array"):
            take(wrong)
    with pytest.raises(UnsupportedError, match="real"):
        take(np.eye(2) * 1j)


@pytest.mark.parametrize("wrong", ["abc", ["1", "2"], np.array([1.0, 2j]), [1.0, 2j], [1.0, [2.0]], [object()]])
def test_eigenvalues_that_are_no_real_numbers_are_refused(wrong, as_users_run_it):
    for take in (fit_tail, ranks):
        with pytest.raises(InputError, match=f"{take.__name__} needs eigenvalues as real numbers"):
            take(wrong)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_have_a_spectrum(dtype):
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=dtype)  # the adjacency matrix of three nodes in a row
    assert spectrum(path).tolist() == pytest.approx([-(2**0.5), 0, 2**0.5], abs=1e-12)
