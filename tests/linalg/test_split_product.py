"""Products of fp16 halves against float64, and against what one fp16 half alone would give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.linalg import split_product
from gramscope.linalg.split_product import add_split_product, split_halves, split_product_pays

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
F64 = torch.float64


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def product(a, b, **options):
    out = torch.zeros(len(a), len(b), device=a.high.device if hasattr(a, "high") else a.device)
    add_split_product(out, a, b, **options)
    return out


def error(found, a, b):
    """The largest error of an entry, relative to the norms of its two rows."""
    a, b = a.double(), b.double()
    sizes = a.norm(dim=1)[:, None] * b.norm(dim=1)
    return float(((found.double() - a @ b.T).abs() / sizes.clamp_min(1e-300)).max())


def assert_right(found, a, b, tolerance):
    got = error(found, a, b)
    assert got <= tolerance, f"off by {got:.1e} of the rows' norms, tolerance {tolerance:.0e}"


def rounded(a):
    """To the 11 binary digits of fp16 and of TF32, with float32's range."""
    mantissa, exponent = torch.frexp(a)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


@pytest.mark.parametrize("columns", [1, 7, 64, 1024, 1025, 5000])
def test_against_float64(columns, device):
    a, b = normal(33, columns, device=device), normal(20, columns, seed=1, device=device)
    assert_right(product(a, b), a, b, 2e-6)


@pytest.mark.parametrize("columns", [300, 9216, 65536])
def test_long_sums_that_do_not_cancel(columns, device):
    """All terms of one sign: the worst case for the accumulators."""
    a, b = normal(9, columns, device=device).abs(), normal(5, columns, seed=1, device=device).abs()
    assert_right(product(a, b), a, b, 1e-5)


def test_one_half_alone_fails(device):
    """Rows of one number have one rounding error, which does not average out."""
    a = torch.tensor([[1 / 3], [0.3333], [1.7777]], device=device).expand(3, 512).contiguous()
    assert_right(product(a, a), a, a, 1e-5)
    with pytest.raises(AssertionError, match="off by"):
        assert_right(rounded(a) @ rounded(a).T, a, a, 1e-4)
    halves = split_halves(a)
    halves.low.zero_()
    with pytest.raises(AssertionError, match="off by"):
        assert_right(product(halves, halves), a, a, 1e-4)


@given(
    n=st.integers(1, 9), m=st.integers(1, 9), columns=st.integers(1, 70), seed=st.integers(0, 999),
    spread=st.integers(0, 30), left=st.integers(-30, 30), right=st.integers(-30, 30),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_random_shapes_and_scales(n, m, columns, seed, spread, left, right):
    """Rows of sizes 10^left and 10^right with entries that spread over 2^spread; products that float32 can hold."""
    right = min(max(right, -36 - left), 34 - left)
    a = normal(n, columns, seed=seed) * 2.0 ** -torch.arange(columns).remainder(spread + 1)
    b = normal(m, columns, seed=seed + 1)
    a, b = (a.double() * 10.0**left).float(), (b.double() * 10.0**right).float()
    assert_right(product(a, b), a, b, 3e-6)


def test_rows_of_very_different_sizes(device):
    """One scale for all rows would lose the small ones."""
    a, b = normal(5, 40, device=device), normal(5, 40, seed=1, device=device)
    sizes = torch.tensor([1e-30, 1e-10, 1.0, 1e10, 1e30], device=device)
    a, b = a * sizes[:, None], b * sizes.flip(0)[:, None] * 1e-2
    found, exact = product(a, b), a.double() @ b.double().T
    fits = (exact.abs() > 1e-36) & (exact.abs() < 3e38)
    assert int(fits.sum()) > 15
    norms = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    assert float(((found - exact).abs() / norms)[fits].max()) < 2e-6
    assert bool((found[exact.abs() > 3.5e38].isinf()).all()), "as float32 overflows"
    assert bool((found[exact.abs() < 1e-46] == 0).all()), "as float32 underflows"


def test_a_huge_and_a_tiny_row_meet(device):
    """Each scale alone would leave float32's range."""
    huge, tiny = torch.full((1, 3000), 3e38, device=device), torch.full((1, 3000), 1e-38, device=device)
    assert_right(product(huge, tiny), huge, tiny, 1e-5)


def test_subnormal_numbers(device):
    a = torch.tensor([[1e-45, 1e-40, 3e-42], [1e-45, 0.0, -1e-45]], device=device)
    b = torch.full((1, 3), 1e30, device=device)
    assert_right(product(a, b), a, b, 1e-6)


def test_zero_rows(device):
    a = normal(4, 10, device=device)
    a[1] = 0
    found = product(a, a)
    assert bool((found[1] == 0).all())
    assert bool((found[:, 1] == 0).all())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row_and_is_not_hidden(bad, device):
    a, b = normal(4, 10, device=device), normal(3, 10, seed=1, device=device)
    b[0] = 0
    a[2, 3] = bad
    found = product(a, b)
    assert bool(found[2].isnan().all())
    others = [0, 1, 3]
    assert_right(found[others], a[others], b, 2e-6)


@pytest.mark.parametrize(("n", "m", "columns"), [(0, 3, 4), (3, 0, 4), (3, 2, 0), (0, 0, 0)])
def test_empty_matrices(n, m, columns, device):
    out = torch.ones(n, m, device=device)
    add_split_product(out, torch.ones(n, columns, device=device), torch.ones(m, columns, device=device))
    assert bool((out == 1).all())


def test_out_may_be_a_view(device):
    """Every second row of some columns, turned; the rest of the tensor is left alone."""
    a, b = normal(4, 30, device=device), normal(6, 30, seed=1, device=device)
    whole = normal(9, 16, seed=2, device=device)
    before = whole.clone()
    view = whole[1:7].T[2:10:2]
    add_split_product(view, a, b)
    added = whole - before
    assert_right(added[1:7].T[2:10:2], a, b, 1e-5)
    added[1:7].T[2:10:2] = 0
    assert bool((added == 0).all())


def test_rows_of_halves_are_used_again(device):
    a = normal(50, 200, device=device)
    halves = split_halves(a)
    out = torch.zeros(50, 50, device=device)
    for start in range(0, 50, 16):
        rows = slice(start, start + 16)
        add_split_product(out[rows, start:], halves[rows], halves[start:])
    assert halves[3:5].high.data_ptr() == halves.high[3:].data_ptr(), "without a copy"
    assert_right(out.triu() + out.triu(1).T, a, a, 2e-6)
    assert_right(product(a, a), a, a, 2e-6)


def test_inputs_of_any_strides(device):
    a, b = normal(30, 12, device=device).T, normal(20, 60, seed=1, device=device)[:, ::2]
    assert_right(product(a, b), a, b, 2e-6)


def test_halves_hold_the_matrix(device):
    a = normal(40, 33, device=device) * 2.0 ** torch.arange(-20, 20, device=device)[:, None]
    halves = split_halves(a)
    assert float(halves.high.abs().max()) <= 16
    off = (halves.dense() - a).abs()
    assert bool((off <= torch.maximum(2.0**-22 * a.abs(), 2.0**-28 * a.abs().amax(1, keepdim=True))).all())


def test_work_in_parts_is_the_same_work(device, monkeypatch):
    a, b = normal(37, 90, device=device), normal(11, 90, seed=1, device=device)
    whole = product(a, b)
    monkeypatch.setattr(split_product, "MAX_ENTRIES_SPLIT", 200)
    monkeypatch.setattr(split_product, "MAX_ENTRIES_SUMMED", 50)
    assert_right(product(a, b), a, b, 2e-6)
    assert torch.allclose(product(a, b), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_sums_in_fp16_are_not_allowed():
    flags = torch.backends.cuda.matmul
    a = normal(64, 4096, device="cuda")
    try:
        flags.allow_fp16_accumulation = True
        assert_right(product(a, a), a, a, 1e-5)
        assert flags.allow_fp16_accumulation
    finally:
        flags.allow_fp16_accumulation = False


def test_where_it_pays():
    assert not split_product_pays(torch.device("cpu"), 10**5, 10**5, 10**5)
    if "cuda" in DEVICES:
        device = torch.device("cuda")
        assert not split_product_pays(device, 640, 640, 65536)
        assert not split_product_pays(device, 10240, 10240, 512)
        fast = torch.cuda.get_device_capability() in split_product.FAST_CHIPS
        assert split_product_pays(device, 10240, 10240, 9216) == fast


def test_bad_input():
    a, out = torch.ones(2, 3), torch.zeros(2, 2)
    with pytest.raises(InputError, match=r"a must be a float32 matrix, got torch\.float64 of shape \(2, 3\)"):
        split_halves(a.double())
    with pytest.raises(InputError, match="same number of columns, got 3 and 4"):
        add_split_product(out, a, torch.ones(2, 4))
    with pytest.raises(InputError, match=r"out must have shape \(2, 5\) for this product, got \(2, 2\)"):
        add_split_product(out, a, torch.ones(5, 3))
    with pytest.raises(InputError, match=r"out must be a float32 matrix, got torch\.float16"):
        add_split_product(out.half(), a, a)
