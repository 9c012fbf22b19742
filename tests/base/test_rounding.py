"""Numerical rank: matrices of known rank in every dtype, made as networks make them; numbers that are exact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.rounding import EPS32, EPS64, Rounding, column_basis, floor, numerical_rank, singular_floor

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]


def chain(n, rank, widths, dtype, seed, relu=False):
    """Features of a stack of linear layers after a bottleneck of ``rank``, all in ``dtype``."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 48, generator=rng)
    x = x.relu() if relu else x
    h = (x @ torch.randn(48, rank, generator=rng) / 7).to(dtype)
    for width in widths:
        h = h @ (torch.randn(h.shape[1], width, generator=rng) / math.sqrt(h.shape[1])).to(dtype)
    return h


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(30, 400),
    rank=st.integers(1, 20),
    extra=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    relu=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_float32_layers_have_the_rank_of_their_bottleneck(n, rank, extra, relu, seed):
    """Layers of at least rank + 1 units: square Gaussian matrices may lose a direction to rounding by themselves."""
    h = chain(n, rank, [rank + more for more in extra], torch.float32, seed, relu)
    assert numerical_rank(h) == rank
    assert numerical_rank(h.double()) == rank  # float32 numbers, whatever holds them
    assert numerical_rank(h.double() * 2.0**-90) == rank


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(30, 300),
    rank=st.integers(8, 15),
    extra=st.lists(st.integers(15, 150), min_size=1, max_size=3),
    dtype=st.sampled_from(HALVES),
    seed=st.integers(0, 10**6),
)
def test_half_precision_layers_too_and_when_cast_up(n, rank, extra, dtype, seed):
    h = chain(n, rank, [rank + more for more in extra], dtype, seed)
    for same in (h, h.float(), h.double()):
        assert numerical_rank(same) == rank


@pytest.mark.parametrize("n", [60, 6000])
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 0.05)])
def test_small_directions_above_rounding_count(n, dtype, least):
    """LAPACK's cut, ε max(n, p) σ_max, would take float32's smallest from 84 rows on, the others' at once."""
    rng = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(k, 12, generator=rng, dtype=torch.float64)).Q for k in (n, 40))
    h = (u * torch.logspace(0, math.log10(least), 12, dtype=torch.float64)) @ v.mT
    assert numerical_rank(h.to(dtype)) == 12
    assert numerical_rank(h) == 12
    assert numerical_rank((h.float() @ torch.eye(40)).to(dtype)) == 12


def test_float64_keeps_what_it_kept():
    """Down to 1e-12 of the largest; LAPACK's own rule for float64 agrees."""
    rng = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(k, 13, generator=rng, dtype=torch.float64)).Q for k in (200, 30))
    h = (u * torch.logspace(0, -12, 13, dtype=torch.float64)) @ v.mT
    assert numerical_rank(h) == int(torch.linalg.matrix_rank(h)) == 13
    products = torch.randn(300, 7, generator=rng).double() @ torch.randn(7, 90, generator=rng).double()
    assert numerical_rank(products) == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_other_units_count(dtype):
    """Each number has its own last digit: columns a thousand times smaller keep theirs."""
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(300, 9, generator=rng) * torch.logspace(0, -3, 9)
    assert numerical_rank(h.to(dtype)) == 9


def test_terms_that_cancel_leave_no_direction():
    """One direction in 300 columns: some are nearly zero, with the error of the others."""
    rng = torch.Generator().manual_seed(0)
    shortest = []
    for _ in range(20):
        x = torch.randn(400, 1, generator=rng) @ torch.randn(1, 50, generator=rng)
        h = x @ torch.randn(50, 300, generator=rng)
        shortest.append(float(h.norm(dim=0).min() / h.norm(dim=0).median()))
        assert numerical_rank(h) == 1
    assert min(shortest) < 1e-3


def numbers():
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 30), generator=rng)
    yield "masks", torch.randn(20, 30, generator=rng) > 0
    yield "pixels", pixels
    yield "pixels over 256", pixels / 256
    yield "counts", torch.randint(0, 3000, (20, 30), generator=rng)
    yield "powers", torch.vander(torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0]))
    yield "zeros", torch.zeros(3, 2)
    yield "none", torch.zeros(0, 2)


@pytest.mark.parametrize("values", [pytest.param(v, id=name) for name, v in numbers()])
def test_exact_numbers_show_no_rounding(values):
    for dtype in (torch.float32, torch.float64):
        assert Rounding.of(values.to(dtype)).eps == EPS64


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES, torch.float8_e4m3fn])
def test_rounded_numbers_show_their_dtype(dtype):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, 30, generator=rng, dtype=torch.float64).to(dtype)
    eps = torch.finfo(dtype).eps
    assert Rounding.of(x).eps == eps
    one_binade = (torch.rand(20, 30, generator=rng, dtype=torch.float64) / 2 + 0.5).to(dtype)  # all in [½, 1)
    assert Rounding.of(one_binade).eps == eps
    if dtype in HALVES:
        assert Rounding.of(x.float()).eps == Rounding.of(one_binade.double()).eps == eps
    assert Rounding.of(x, torch.bfloat16).eps == max(eps, 2**-7)


def test_batches_merge_to_the_whole():
    """A batch without digits says nothing; one of a coarser dtype counts for all; one that fits by chance does not."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    whole, none = Rounding.of(x), Rounding.of(x * 0)
    assert whole.merged(none) == none.merged(whole) == whole
    assert Rounding.of(x.bfloat16()).merged(whole).eps == 2**-7
    assert Rounding.of(x[:4].bfloat16().float()).merged(whole).eps == EPS32


def test_the_floor_is_above_the_errors_and_near_them():
    """Rounding to float32 once, without sums: the errors' singular values are below the floor, by 32 to 200 times."""
    rng = torch.Generator().manual_seed(0)
    for n, p in ((30, 400), (400, 30), (100, 100)):
        h = torch.randn(n, p, generator=rng, dtype=torch.float64)
        errors = h.float().double() - h
        sizes = Rounding.of(h.float()).errors(h.norm(dim=0))
        largest = float(torch.linalg.svdvals(errors / sizes)[0])
        assert floor(n, p) / 200 < largest < floor(n, p) / 32
        spectral, least = float(torch.linalg.svdvals(errors)[0]), float(singular_floor(h, Rounding.of(h.float())))
        assert least / 300 < spectral < least / 32


def test_a_basis_spans_the_columns_and_is_empty_for_zeros():
    h = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double() @ torch.ones(3, 9).double()
    basis = column_basis(h, Rounding.of(h), 20, h.norm(dim=0))
    assert basis.shape == (20, 1)
    assert torch.allclose(basis @ (basis.mT @ h), h)
    assert column_basis(0 * h, Rounding(), 20, 0 * h[0]).shape == (20, 0)


@pytest.mark.parametrize("width", [8, 30])  # fewer columns than rows, and more
def test_columns_of_zeros_span_nothing_and_need_no_svd(monkeypatch, width):
    h = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).relu()
    h[:, ::3] = 0
    wide, zero = h.double(), torch.zeros(20, dtype=torch.float64)
    u, s, _ = torch.linalg.svd(wide)
    exact = u[:, : int((s > 1e-6).sum())]
    monkeypatch.setattr(torch.linalg, "svd", lambda *_: pytest.fail("an SVD, though all other columns are independent"))
    basis = column_basis(wide, Rounding.of(h), 20, wide.norm(dim=0))
    assert torch.allclose(basis @ basis.mT, exact @ exact.mT, atol=1e-12)  # float64, condition about 10
    assert torch.equal(basis.mT @ zero, torch.zeros(basis.shape[1], dtype=torch.float64))


@pytest.mark.parametrize("lost", [1, 3, 20])
def test_a_few_directions_of_rounding_are_left_out_without_an_svd_of_all(monkeypatch, lost):
    """As behind a layer norm; more than a few are left to the SVD. Of rounding there is more and less."""
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(90, 40, generator=rng, dtype=torch.float64)
    h[:, :lost] = h[:, -lost:] @ torch.randn(lost, lost, generator=rng, dtype=torch.float64)
    h[:, :lost] += 10.0 ** -torch.arange(9, 9 + lost) * torch.randn(90, lost, generator=rng, dtype=torch.float64)
    u, s, _ = torch.linalg.svd(h / Rounding.of(h.float()).errors(h.norm(dim=0)), full_matrices=False)
    exact = u[:, :-lost]
    assert s[-lost] < floor(90, 40) < s[-lost - 1]
    squares, svd = list[torch.Size](), torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda a, **how: squares.append(a.shape) or svd(a, **how))
    basis = column_basis(h, Rounding.of(h.float()), 90, h.norm(dim=0))
    assert ((40, 40) in squares) == (lost == 20)
    assert torch.allclose(basis @ basis.mT, exact @ exact.mT, atol=1e-11)  # float64, singular values above 1e-4


def test_a_few_numbers_tell_rounding_only_where_all_do():
    """The short way is taken for most numbers; where few digits stand first and many later, the long way decides."""
    some = torch.zeros(64, 8)
    some[-1, -1] = 1 / 3
    some[-1, 0] = 1.0
    assert Rounding.of(some).eps == EPS32
    assert Rounding.of((some > 0.5).float()).eps == EPS64
