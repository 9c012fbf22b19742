"""Numbers whose squares do not fit: solvers find the same as at an ordinary size, or say that they did not."""

import math

import pytest
import torch

from gramscope.linalg import (
    Dense,
    Diagonal,
    Identity,
    Zero,
    conjugate_gradient,
    eigenvalues_top,
    hutchinson,
    hutchinson_diagonal,
    hutchpp,
    lanczos,
    one_sided_trace,
    one_sided_trace_to,
    randomised_svd,
    tridiagonalise,
    xtrace,
)
from gramscope.linalg.orthogonal import norms
from gramscope.linalg.scale import excess
from linalg.operator_cases import with_spectrum

F64 = torch.float64
SCALES = [1e-300, 1e-170, 1e-160, 1e155, 1e300]
PLAIN = with_spectrum(torch.linspace(0.1, 1, 20, dtype=F64))
ONES = torch.ones(20, dtype=F64)


def times(scale: float, dtype: torch.dtype = F64) -> Dense:
    return Dense((PLAIN.matrix * scale).to(dtype), symmetric=True)


@pytest.mark.parametrize("scale", SCALES)
def test_norms(scale: float) -> None:
    x = torch.randn(50, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([x * scale, torch.zeros(50, 1, dtype=F64), x], dim=1)
    wanted = torch.cat([x.norm(dim=0) * scale, torch.zeros(1, dtype=F64), x.norm(dim=0)])
    torch.testing.assert_close(norms(mixed), wanted, rtol=1e-14, atol=0)
    odd = torch.tensor([[math.inf, math.nan], [1.0, 1.0]], dtype=F64)
    assert norms(odd)[0] == math.inf
    assert norms(odd)[1].isnan()
    assert norms(x[:0]).tolist() == [0.0] * 3


def test_ordinary_numbers_are_left_alone() -> None:
    for ordinary in (0.0, 1.0, 1e-30, 1e30, math.inf, math.nan):
        assert excess(torch.tensor([ordinary], dtype=F64)) == 0
    assert excess(torch.tensor([2.0**500], dtype=F64)) == 501


@pytest.mark.parametrize("scale", SCALES)
def test_eigenvalues(scale: float) -> None:
    pairs = eigenvalues_top(times(scale), 3)
    assert pairs.all_converged
    torch.testing.assert_close(pairs.values / scale, eigenvalues_top(PLAIN, 3).values, rtol=1e-12, atol=0)
    # The true residual, taken with a product of ordinary size.
    truth = (PLAIN @ pairs.vectors - pairs.vectors * (pairs.values / scale)).norm(dim=0)
    assert float(truth.max()) < 1e-10
    found = lanczos(times(scale), 20)
    assert found.all_converged
    torch.testing.assert_close(found.values[:3] / scale, pairs.values / scale, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_tridiagonal_matrix_and_start(scale: float) -> None:
    plain = tridiagonalise(PLAIN, 5, start=ONES)
    for known, by in (
        (tridiagonalise(times(scale), 5, start=ONES), scale),
        (tridiagonalise(PLAIN, 5, start=ONES * scale), 1.0),
    ):
        torch.testing.assert_close(known.matrix() / by, plain.matrix(), rtol=1e-10, atol=1e-12)
        assert known.residual / by == pytest.approx(plain.residual, rel=1e-10)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_float32_squares(scale: float) -> None:
    for pairs in (eigenvalues_top(times(scale, torch.float32), 2), lanczos(times(scale, torch.float32), 20)):
        assert bool(pairs.converged[0])
        assert float(pairs.values[0]) / scale == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_singular_values(scale: float) -> None:
    found = randomised_svd(Dense(torch.diag(torch.arange(1, 5, dtype=F64)) * scale), 2)
    torch.testing.assert_close(found.values / scale, torch.tensor([4.0, 3.0], dtype=F64), rtol=1e-12, atol=0)
    assert found.all_converged
    assert float(found.residuals.max()) / scale < 1e-12


@pytest.mark.parametrize("scale", SCALES)
def test_conjugate_gradients(scale: float) -> None:
    exact = torch.linalg.solve(PLAIN.matrix, ONES)
    inverse = Identity(20, dtype=F64) * (1 / scale)
    cases = [
        (conjugate_gradient(PLAIN, ONES * scale), scale),
        (conjugate_gradient(times(scale), ONES, tol=1e-14), 1 / scale),
        (conjugate_gradient(times(scale), ONES * scale, preconditioner=inverse), 1.0),
    ]
    for solution, by in cases:
        assert not bool(solution.negative_curvature.any())
        assert float((solution.x / by - exact).norm()) < 1e-8
        assert 0 < float(solution.residuals) < 1e-10
    mixed = conjugate_gradient(PLAIN, torch.stack([ONES, ONES * scale, 0 * ONES], dim=1))
    assert mixed.all_converged
    torch.testing.assert_close(mixed.x[:, 1] / scale, mixed.x[:, 0], rtol=1e-9, atol=0)


@pytest.mark.parametrize(("size", "right"), [(1e300, 1e-300), (1e-300, 1e300)])
def test_a_solution_beyond_the_dtype_has_not_converged(size: float, right: float) -> None:
    assert not conjugate_gradient(times(size), ONES * right).all_converged


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("method", [hutchinson, hutchpp, xtrace])
def test_traces(method, scale: float) -> None:
    plain, found = method(PLAIN, 12), method(times(scale), 12)
    assert found.value / scale == pytest.approx(plain.value, rel=1e-10)
    assert found.standard_error / scale == pytest.approx(plain.standard_error, rel=1e-9)
    assert 0 < plain.standard_error < math.inf


@pytest.mark.parametrize("scale", SCALES)
def test_diagonals(scale: float) -> None:
    plain, found = hutchinson_diagonal(PLAIN, 12, block=5), hutchinson_diagonal(times(scale), 12, block=5)
    torch.testing.assert_close(found.value / scale, plain.value, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.standard_error / scale, plain.standard_error, rtol=1e-10, atol=0)


def test_one_sided_traces() -> None:
    plain, found = one_sided_trace(PLAIN, 12), one_sided_trace(times(1e150), 12)
    assert found.standard_error / 1e300 == pytest.approx(plain.standard_error, rel=1e-10)
    for beyond in (1e-170, 1e155):  # tr(J Jᵀ) is no float64
        assert one_sided_trace_to(times(beyond), 0.5, most=32).converged is False
    assert one_sided_trace_to(Zero(5, 5, dtype=F64), 0.5).converged


@pytest.mark.parametrize("value", [3.0, 0.0, -2e-200])
@pytest.mark.parametrize("kind", ["sphere", "gaussian", "rademacher"])
@pytest.mark.filterwarnings("error")
def test_xtrace_of_a_number(kind: str, value: float) -> None:
    found = xtrace(Diagonal(torch.tensor([value], dtype=F64)), 6, distribution=kind)
    assert found.value == pytest.approx(value, rel=1e-14)
    assert found.standard_error <= 1e-15 * abs(value), "rounding"
