"""Gaussian expectations: quadrature against closed forms, kinks against smooth limits, singular kernels."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Kinked, Smooth, resolve
from gramscope.theory.families import PAIRS, QUADS
from gramscope.theory.gaussian_expectations import gaussian_moments, smooth_moments
from gramscope.theory.orthant import SignMoments, four_signs
from references.closed_moments import erf_moments, sine_moments
from references.finite_width import Brackets
from references.orthants import four_signs_of_tables

NAMES = [*PAIRS, *QUADS]


def kernel(n, rank, seed=0, shift=0.0, scale=1.0):
    x = torch.randn(n, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = torch.nn.functional.normalize(x)
    return scale * x @ x.T + shift


def assert_moments_equal(one, other, tolerance):
    for name in NAMES:
        torch.testing.assert_close(
            getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(["sin", "erf"]),
    seed=st.integers(0, 99),
    rank=st.integers(1, 4),
    shift=st.sampled_from([0.0, 0.3]),
)
def test_quadrature_against_closed_forms(name, seed, rank, shift):
    """Four distinct samples, of full and of deficient rank."""
    K = kernel(4, rank, seed, shift)
    assert_moments_equal(gaussian_moments(name, K, 1e-11), {"sin": sine_moments, "erf": erf_moments}[name](K), 1e-10)


@pytest.mark.parametrize(("rank", "order"), [(1, 200), (2, 120), (3, 60), (4, 34)])
def test_four_samples_against_the_full_grid(rank, order):
    K = kernel(4, rank, seed=3, scale=0.6)
    activation = resolve("gelu")
    m = Brackets(activation.jets, K, order)
    found = gaussian_moments(activation, K)
    # Few nodes a variable fit the plain grid of four variables: the reference is good to about 1e-8 there.
    assert found.q2110[2, 0, 3, 1].item() == pytest.approx(m((2, 2), (0, 1), (3, 1), (1, 0)).item(), abs=1e-7)
    assert found.q0011[0, 1, 2, 3].item() == pytest.approx(m((0, 0), (1, 0), (2, 1), (3, 1)).item(), abs=1e-7)
    if rank > 1:  # the order of the indices counts
        assert abs(found.q2110[2, 0, 3, 1].item() - found.q2110[0, 2, 3, 1].item()) > 1e-5


def test_the_tolerance_is_kept():
    K = kernel(3, 3, shift=0.5, scale=2.0)
    fine = smooth_moments(resolve("tanh"), K, 1e-12)
    for tolerance in (1e-4, 1e-7, 1e-10):
        assert_moments_equal(smooth_moments(resolve("tanh"), K, tolerance), fine, tolerance)


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 40.0])
def test_tiny_and_large_kernels(scale):
    """As K → 0, <ssss> → 3K² and <s''s's's> → -2K for tanh; a large kernel converges too."""
    m = gaussian_moments(resolve("tanh"), torch.full((2, 2), scale, dtype=torch.float64))
    if scale < 1e-3:
        assert m.q0000[0, 0, 1, 1].item() == pytest.approx(3 * scale**2, rel=20 * scale + 1e-6)
        assert m.q2110[0, 0, 1, 1].item() == pytest.approx(-2 * scale, rel=20 * scale + 1e-6)
    else:
        assert 0 < m.p11[0, 1] < m.p00[0, 1] < 1


def test_a_zero_input_is_no_accident():
    K = kernel(3, 3)
    K[0] = K[:, 0] = 0.0
    m = gaussian_moments(resolve("gelu"), K)
    assert m.p00[0].abs().max() == 0
    assert m.p11[0, 0].item() == pytest.approx(0.25)


def softened(a_plus, a_minus, sharpness):
    """a₋ z + (a₊ - a₋) z Φ(βz), which becomes piecewise linear as β → ∞."""

    def jets(z):
        y = sharpness * z
        cdf, pdf = torch.special.ndtr(y), torch.exp(-y * y / 2) / math.sqrt(2 * math.pi)
        step = a_plus - a_minus
        return [
            a_minus * z + step * z * cdf,
            a_minus + step * (cdf + y * pdf),
            step * sharpness * (2 - y * y) * pdf,
            step * sharpness**2 * (y * y - 4) * y * pdf,
        ]

    return Smooth("softened", jets)


@pytest.mark.parametrize(("slopes", "n"), [((1.0, 0.0), 3), ((1.0, -0.4), 2)])
def test_kinks_are_the_limit_of_smooth_activations(slopes, n):
    """The closed forms and the δ s'ᵐ rule; the gap falls with the sharpness (derived in docs/finite-width.md)."""
    K = kernel(n, 3, seed=5, shift=0.2)
    exact = gaussian_moments(Kinked(*slopes), K)
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    gaps = []
    for sharpness in (4.0, 8.0):
        near = smooth_moments(softened(*slopes, sharpness), K, 1e-4)
        gap = {}
        for name in NAMES:
            difference = (getattr(near, name) - getattr(exact, name)).abs()
            # One sample's <s'''s'> and <s''s''> are infinite in the limit; only their sum, 0, is used.
            gap[name] = float((difference[off_diagonal] if name in ("p22", "p13") else difference).max())
        gaps.append(gap)
    for name in NAMES:
        assert gaps[1][name] < 0.75 * gaps[0][name] + 1e-3, name
        assert gaps[1][name] < 0.05, name
    # A wrong weight of the kink would be seen: it changes <s''s's's> by a sixth to a third of its size.
    assert float(exact.q2110.abs().max()) > 0.1


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 4))
def test_signs_and_powers_against_sampling(seed, rank):
    """E[z^p ∏ sgn z] of up to four variables, of any rank."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(4, rank, generator=rng, dtype=torch.float64)
    z = torch.randn(200_000, rank, generator=rng, dtype=torch.float64) @ x.T
    moments = SignMoments((x @ x.T).tolist())
    for powers, signs in [
        ((1, 1, 0, 0), (2, 3)),
        ((1, 1, 1, 1), (0, 1, 2, 3)),
        ((0, 0, 0, 0), (0, 1, 2, 3)),
        ((2, 1, 0, 0), (3,)),
    ]:
        if rank == 1 and len(signs) != 1:
            continue  # signs of one line are products of ±1, exact: below
        values = (z ** torch.tensor(powers)).prod(-1) * z[:, list(signs)].sign().prod(-1)
        error = float(values.std()) / 200_000**0.5
        assert moments(powers, signs) == pytest.approx(float(values.mean()), abs=5 * error + 1e-12)


def test_four_signs_where_they_are_known():
    """Equal correlation 1/2: P(all of four signs equal) = 2/5, hence E = 1/5."""
    R = torch.full((4, 4), 0.5, dtype=torch.float64) + 0.5 * torch.eye(4, dtype=torch.float64)
    assert four_signs(R.tolist()) == pytest.approx(0.2, abs=1e-15)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_four_signs_against_fixed_nodes(rank):
    x = torch.nn.functional.normalize(
        torch.randn(30, 4, rank, generator=torch.Generator().manual_seed(rank)).double(), dim=2
    )
    R = x @ x.mT
    want = four_signs_of_tables(R)
    assert [four_signs(table) for table in R.tolist()] == pytest.approx(want.tolist(), abs=1e-12)


def test_four_signs_of_nearly_equal_variables():
    """1 - E falls as the square root of 1 - ρ, over ten decades: nothing cancels."""

    def slope(gap):
        R = torch.full((4, 4), 1 - gap, dtype=torch.float64) + gap * torch.eye(4, dtype=torch.float64)
        return (1 - four_signs(R.tolist())) / math.sqrt(gap)

    assert [slope(gap) for gap in (1e-6, 1e-8, 1e-10)] == pytest.approx([slope(1e-4)] * 3, rel=1e-5)


def test_slopes_of_a_kink_have_the_digits_of_their_input():
    z = torch.tensor([-2.0, 3.0], dtype=torch.float64)
    assert Kinked(0.3, 0.01).jets(z)[:2].tolist() == [[-2.0 * 0.01, 3.0 * 0.3], [0.01, 0.3]]


def test_collinear_inputs_of_a_kink():
    """z_b = -2 z_a: s'_a s'_b = a₊ a₋ and s_a s_b = -2 a₊ a₋ z², exactly."""
    a, b = 1.0, 0.3
    z = torch.tensor([1.0, -2.0], dtype=torch.float64)
    m = gaussian_moments(Kinked(a, b), torch.outer(z, z))
    assert m.p11[0, 1].item() == pytest.approx(a * b)
    assert m.p00[0, 1].item() == pytest.approx(-2 * a * b)
    assert m.q1111[0, 1, 0, 1].item() == pytest.approx((a * b) ** 2)
    assert m.q0000[0, 0, 1, 1].item() == pytest.approx(3 * 4 * (a * b) ** 2)
    assert all(torch.isfinite(getattr(m, name)).all() for name in NAMES)


def test_what_is_refused():
    tanh = resolve("tanh")
    with pytest.raises(InputError, match="positive semi-definite"):
        gaussian_moments(tanh, torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64))
    with pytest.raises(InputError, match="symmetric"):
        gaussian_moments(tanh, torch.tensor([[1.0, 0.2], [0.3, 1.0]], dtype=torch.float64))
    with pytest.raises(InputError, match="finite"):
        gaussian_moments(tanh, torch.tensor([[float("nan")]], dtype=torch.float64))
    with pytest.raises(InputError, match="kink"):
        gaussian_moments(resolve("relu"), torch.zeros(1, 1, dtype=torch.float64))
    with pytest.raises(InputError, match="tol"):
        smooth_moments(tanh, torch.eye(1, dtype=torch.float64), 1e-20)
    with pytest.raises(InputError, match="must converge"):
        smooth_moments(softened(1.0, 0.0, 40.0), torch.eye(1, dtype=torch.float64), 1e-10)
