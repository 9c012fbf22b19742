"""Merged moments are the moments of everything, in any split and order, for any input dtype."""

from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.moments import CrossMoments, Moments, as_rows


def naive(x, y):
    """Sums written out, one row at a time."""
    x, y = x.double(), y.double()
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return mean_x, mean_y, sum(torch.outer(a - mean_x, b - mean_y) for a, b in zip(x, y, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 30),
    p=st.integers(1, 6),
    q=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    shift=st.sampled_from([0.0, 1.0, 1e6]),
    seed=st.integers(0, 10**6),
)
def test_any_split_and_order(n, p, q, cuts, shift, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=rng, dtype=torch.float64) + shift
    y = torch.randn(n, q, generator=rng, dtype=torch.float64) - shift
    edges = sorted({0, n, *(min(cut, n) for cut in cuts)})
    parts = [CrossMoments.of(x[a:b], y[a:b]) for a, b in pairwise(edges)]
    parts = [parts[i] for i in torch.randperm(len(parts), generator=rng).tolist()]
    parts.insert(0, CrossMoments.of(x[:0], y[:0]))  # a rank without examples is neutral
    merged = reduce(lambda a, b: a.merged(b), parts)
    mean_x, mean_y, scatter = naive(x, y)
    assert merged.n == n
    # The mean itself is known to eps * shift, and the scatter sees that to first order times the spread.
    tolerance = 1e-12 + 1e-15 * shift * n
    assert torch.allclose(merged.mean_x, mean_x, rtol=1e-13, atol=1e-13)
    assert torch.allclose(merged.mean_y, mean_y, rtol=1e-13, atol=1e-13)
    assert torch.allclose(merged.scatter, scatter, rtol=1e-12, atol=tolerance * 10)


def test_variance_survives_a_mean_that_swallows_it_in_float32():
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64) + 1e8
    found = Moments.of(x)
    assert abs(float(found.covariance()) - 2 / 3) < 1e-12
    by_squares = (x.float() ** 2).mean() - x.float().mean() ** 2
    assert abs(float(by_squares) - 2 / 3) > 0.1, "the textbook formula is expected to fail here"


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool]
)
def test_input_dtypes(dtype):
    x = torch.tensor([[0, 1], [1, 1], [1, 0]]).to(dtype)
    found = Moments.of(x)
    assert found.scatter.dtype == torch.float64
    assert torch.allclose(found.scatter, torch.tensor([[2 / 3, -1 / 3], [-1 / 3, 2 / 3]], dtype=torch.float64))


def test_second_moment_is_uncentred():
    x = torch.randn(7, 3, dtype=torch.float64)
    assert torch.allclose(Moments.of(x).second_moment(), x.mT @ x / 7)
    assert torch.allclose(Moments.of(x).covariance(unbiased=True), x.mT.cov())


def test_not_contiguous_and_more_axes():
    x = torch.randn(4, 5, 6).transpose(0, 2)
    assert not x.is_contiguous()
    assert torch.equal(as_rows(x), x.reshape(6, -1).double())
    assert as_rows(torch.zeros(0, 3, 2)).shape == (0, 6)
    assert as_rows(torch.ones(3)).shape == (3, 1)


def test_wrong_input_is_explained():
    with pytest.raises(InputError, match="same examples"):
        CrossMoments.of(torch.ones(3, 1), torch.ones(4, 1))
    with pytest.raises(InputError, match="width"):
        Moments.of(torch.ones(3, 1)).merged(Moments.of(torch.ones(3, 2)))
    with pytest.raises(InputError, match="finite"):
        Moments.of(torch.tensor([[float("nan")]]))
    with pytest.raises(UnsupportedError, match="real"):
        Moments.of(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match="at least 2 rows"):
        Moments.of(torch.ones(1, 2)).covariance(unbiased=True)
    with pytest.raises(InputError, match="first axis"):
        as_rows(torch.tensor(1.0))
