"""Trace estimates against exact traces and slow references, and their errors against their spread."""

import pytest
import torch

from gramscope.base.rng import child_seed, generator
from gramscope.linalg import (
    Dense,
    Diagonal,
    Identity,
    LowRank,
    TraceEstimate,
    hutchinson,
    hutchpp,
    one_sided_trace,
    xtrace,
)
from gramscope.linalg.traces import draw_probes
from linalg.operator_cases import matrix, with_spectrum
from references.linalg import hutchpp_value, xtrace_samples

F64 = torch.float64
METHODS = [hutchinson, hutchpp, xtrace]
KINDS = ["rademacher", "gaussian", "sphere"]
SPECTRA = {
    "flat": torch.linspace(1, 2, 40, dtype=F64),
    "power": torch.arange(1, 41, dtype=F64) ** -2,
    "exponential": 0.7 ** torch.arange(40, dtype=F64),
    "indefinite": torch.linspace(-1, 1, 40, dtype=F64),
}


@pytest.mark.parametrize("spectrum", ["flat", "exponential", "indefinite"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_error_bar_is_the_spread(method, kind: str, spectrum: str) -> None:  # type: ignore[no-untyped-def]
    """Over 120 seeds: no bias, and the stated error is the spread within the factor each method states.

    The spread itself is known to 1/√240 = 6% here. Hutchinson and Hutch++ average independent samples;
    XTrace's samples share products, for which its error allows by a factor n / (n - m) = 1.4.
    """
    op = with_spectrum(SPECTRA[spectrum])
    estimates = [method(op, 24, distribution=kind, seed=seed) for seed in range(120)]
    values = torch.tensor([e.value for e in estimates], dtype=F64)
    stated = torch.tensor([e.standard_error for e in estimates], dtype=F64)
    spread = float(values.std())
    assert abs(float(values.mean() - op.matrix.trace())) < 4 * spread / 120**0.5
    ratio = float((stated**2).mean().sqrt()) / spread
    low, high = (0.75, 2.0) if method is xtrace else (0.75, 1.3)
    assert low < ratio < high, f"stated error / spread = {ratio:.2f}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_xtrace_is_the_naive_leave_one_out(kind: str, symmetric: bool) -> None:
    a = matrix(30, 30, F64, seed=3)
    op = Dense(a @ a.mT, symmetric=True) if symmetric else Dense(a)
    for products in (4, 10, 40):
        estimate = xtrace(op, products, distribution=kind, seed=5)
        omega = draw_probes(op, products // 2, kind, generator(child_seed(5, "xtrace")))
        samples = xtrace_samples(op.matrix, omega, on_sphere=kind == "sphere")
        scale = float(op.matrix.norm())
        assert abs(estimate.value - float(samples.mean())) < 1e-11 * scale
        error = float(samples.std()) / len(samples) ** 0.5 * 30 / (30 - len(samples))
        assert abs(estimate.standard_error - error) < 1e-11 * scale
        assert (estimate.samples, estimate.products) == (products // 2, products)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_hutchpp_is_its_definition(kind: str) -> None:
    op = with_spectrum(SPECTRA["power"])
    estimate = hutchpp(op, 20, distribution=kind, seed=2)
    rng = generator(child_seed(2, "hutchpp"))
    sketch, rest = draw_probes(op, 6, kind, rng), draw_probes(op, 8, kind, rng)
    assert abs(estimate.value - float(hutchpp_value(op.matrix, sketch, rest))) < 1e-13
    assert (estimate.samples, estimate.products) == (8, 20)


def test_hutchpp_draws_on_the_sphere_of_the_complement() -> None:
    op = with_spectrum(SPECTRA["power"])
    estimate = hutchpp(op, 20, distribution="sphere", seed=2)
    rng = generator(child_seed(2, "hutchpp"))
    sketch, rest = draw_probes(op, 6, "sphere", rng), draw_probes(op, 8, "sphere", rng)
    basis = torch.linalg.qr(op.matrix @ sketch).Q
    rest = rest * (40 - 6) ** 0.5 / (rest - basis @ (basis.mT @ rest)).norm(dim=0)
    assert abs(estimate.value - float(hutchpp_value(op.matrix, sketch, rest))) < 1e-13
    # All samples of one length: where the complement has one eigenvalue, there is no variance.
    flat = hutchpp(Identity(40, dtype=F64), 24, distribution="sphere")
    assert abs(flat.value - 40) < 1e-12
    assert flat.standard_error < 1e-12


def test_decay_is_rewarded() -> None:
    """With the same products Hutch++ beats Hutchinson on a decaying spectrum, and XTrace beats Hutch++."""
    op = with_spectrum(SPECTRA["exponential"])
    exact = float(op.matrix.trace())
    rms = {
        method: sum((method(op, 36, seed=s).value - exact) ** 2 for s in range(30)) ** 0.5 / 30**0.5
        for method in METHODS
    }
    assert rms[hutchpp] < rms[hutchinson] / 4
    assert rms[xtrace] < rms[hutchpp] / 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [hutchpp, xtrace])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_low_rank_is_exact(method, kind: str, rank: int) -> None:  # type: ignore[no-untyped-def]
    op = LowRank(matrix(20, rank, F64), rows=None)
    estimate = method(op, 18, distribution=kind, seed=1)
    assert abs(estimate.value - float(op.dense().trace())) < 1e-11
    assert estimate.standard_error < 1e-11


@pytest.mark.parametrize("method", [hutchpp, xtrace])
@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_as_large_as_the_operator_is_exact(method, kind: str) -> None:  # type: ignore[no-untyped-def]
    op = Dense(matrix(6, 6, F64))
    estimate = method(op, 30, distribution=kind)
    exact = float(op.matrix.trace())
    if kind == "sphere" or (method is hutchpp and kind == "gaussian"):
        # XTrace's projectors each miss one direction, and on the sphere of a line a sample is exact.
        assert abs(estimate.value - exact) < 1e-12
        assert estimate.products == 12
    else:
        # Six random sign vectors need not span six dimensions.
        assert abs(estimate.value - exact) <= 6 * estimate.standard_error
    wide = method(LowRank(matrix(6, 2, F64)), 60, distribution=kind)
    assert abs(wide.value - float(matrix(6, 2, F64).square().sum())) < 1e-12


def test_partial_dependence_between_probe_images() -> None:
    """Y of low rank in which one column stands alone: only that one is missed when left out."""
    from gramscope.linalg.exchangeable_trace import leave_one_out

    shared, alone = matrix(9, 1, F64), matrix(9, 1, F64, seed=1)
    image = torch.cat([shared, 2 * shared, alone, -shared], dim=1)
    basis, dropped = leave_one_out(image)
    assert basis.shape == (9, 2)
    assert dropped.norm(dim=0).round(decimals=12).tolist() == [0.0, 0.0, 1.0, 0.0]
    lost = basis @ dropped[:, 2]
    assert abs(float(lost @ shared[:, 0])) < 1e-12


def test_rademacher_meets_a_diagonal_exactly() -> None:
    estimate = hutchinson(Diagonal(torch.arange(5, dtype=F64)), 3)
    assert estimate.value == 10.0
    assert estimate.standard_error < 1e-13, "rounding"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_with_float64(method, kind: str) -> None:  # type: ignore[no-untyped-def]
    a = with_spectrum(SPECTRA["power"]).matrix
    wide = method(Dense(a), 12, distribution=kind, seed=4)
    single = method(Dense(a.float()), 12, distribution=kind, seed=4)
    assert abs(wide.value - single.value) < 1e-4
    assert isinstance(single.value, float)


def test_zero_operator() -> None:
    for method in METHODS:
        estimate = method((0.0 * Identity(5, dtype=F64)), 6)
        assert (estimate.value, estimate.standard_error) == (0.0, 0.0)


def test_block_does_not_change_the_result() -> None:
    op = Dense(matrix(12, 12, F64))
    assert abs(hutchinson(op, 20, block=3).value - hutchinson(op, 20, block=64).value) < 1e-12
    assert abs(one_sided_trace(op, 20, block=3).value - one_sided_trace(op, 20, block=64).value) < 1e-11


@pytest.mark.parametrize("method", METHODS)
def test_seed_and_streams(method) -> None:  # type: ignore[no-untyped-def]
    op = Dense(matrix(12, 12, F64))
    before, default = torch.random.get_rng_state(), torch.get_default_dtype()
    assert method(op, 8, seed=3) == method(op, 8, seed=3)
    assert method(op, 8, seed=3).value != method(op, 8, seed=4).value
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_default_dtype() == default


def test_data_drawn_from_the_same_seed_is_no_trap() -> None:
    """Probes that equalled the caller's own Gaussian data would give z zᵀ a trace of n², not n."""
    data = matrix(400, 1, F64, seed=0)
    estimate = hutchinson(LowRank(data), 10, distribution="gaussian", seed=0)
    assert abs(estimate.value - 400) < 6 * estimate.standard_error + 400
    assert estimate.value < 5000


def test_estimate_reads_well() -> None:
    estimate = TraceEstimate(12.3456789, 0.234, 10, 0, "xtrace", "sphere", F64, torch.device("cpu"), 5)
    assert str(estimate) == "12.3457 ± 0.23 (xtrace, 10 products)"


@pytest.mark.parametrize("method", [hutchinson, hutchpp, xtrace, one_sided_trace])
def test_estimates_say_what_they_were_made_of(method) -> None:
    for dtype in (torch.float32, F64):
        found = method(Dense(torch.eye(12, dtype=dtype), symmetric=True), 12, seed=3)
        assert (found.seed, found.dtype, found.device) == (3, dtype, torch.device("cpu"))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="same axes on both sides"):
        hutchinson(Dense(matrix(3, 2, F64)), 10)
    for method, least in ((hutchinson, 2), (hutchpp, 6), (xtrace, 4), (one_sided_trace, 2)):
        with pytest.raises(ValueError, match=f"products >= {least}.*got {least - 1}"):
            method(Identity(9, dtype=F64), least - 1)
        with pytest.raises(ValueError, match="finite"):
            method(Diagonal(torch.full((9,), torch.nan)), 6)
