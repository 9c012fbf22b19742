"""Conjugate gradients against a direct solve, and what it says where it must not be used."""

import pytest
import torch

from gramscope.linalg import (
    Dense,
    Diagonal,
    Function,
    Identity,
    LowRank,
    conjugate_gradient,
)
from linalg.operator_cases import matrix, with_spectrum

F64 = torch.float64


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("k", [None, 0, 1, 5])
def test_agrees_with_a_direct_solve(k: int | None, dtype: torch.dtype) -> None:
    op = with_spectrum(torch.linspace(0.1, 10, 60).to(dtype))
    b = matrix(60, 1, dtype)[:, 0] if k is None else matrix(60, k, dtype)
    solution = conjugate_gradient(op, b)
    assert solution.x.shape == b.shape
    assert solution.x.dtype == dtype
    assert solution.all_converged
    assert not solution.negative_curvature.any()
    tol = 1e-8 if dtype == F64 else 1e-2
    torch.testing.assert_close(solution.x, torch.linalg.solve(op.matrix, b), rtol=tol, atol=tol)


def test_residuals_are_the_true_ones() -> None:
    op = with_spectrum(torch.logspace(-4, 2, 50, dtype=F64))
    b = matrix(50, 3, F64)
    for max_iter in (3, 20, 500):
        solution = conjugate_gradient(op, b, max_iter=max_iter)
        true = (b - op @ solution.x).norm(dim=0) / b.norm(dim=0)
        torch.testing.assert_close(solution.residuals, true, rtol=1e-10, atol=1e-16)
        assert (solution.iterations <= max_iter).all()
        assert torch.equal(solution.converged, true <= torch.finfo(F64).eps ** (2 / 3))


def test_drift_of_the_recurrence_is_not_believed() -> None:
    """In float32 on an ill-conditioned operator the recurrence reports residuals that are not there."""
    op = with_spectrum(torch.logspace(-5, 0, 80))
    b = op @ matrix(80, 2, torch.float32)
    solution = conjugate_gradient(op, b, tol=1e-6, max_iter=3000)
    true = (b.double() - op.matrix.double() @ solution.x.double()).norm(dim=0) / b.double().norm(dim=0)
    assert (true[solution.converged] <= 2e-6).all()
    torch.testing.assert_close(solution.residuals, true, rtol=0.5, atol=2e-6)


def test_few_distinct_eigenvalues_need_as_few_steps() -> None:
    values = torch.tensor([1.0] * 20 + [5.0] * 20 + [9.0] * 20, dtype=F64)
    solution = conjugate_gradient(with_spectrum(values), matrix(60, 2, F64))
    assert solution.all_converged
    assert solution.iterations.tolist() == [3, 3]


def test_each_column_stops_by_itself() -> None:
    op = Diagonal(torch.linspace(1, 100, 50, dtype=F64))
    easy = torch.zeros(50, dtype=F64)
    easy[3] = 1.0
    b = torch.stack([torch.zeros(50, dtype=F64), easy, torch.ones(50, dtype=F64)], dim=1)
    solution = conjugate_gradient(op, b)
    assert solution.all_converged
    assert solution.iterations[0] == 0
    assert solution.iterations[1] == 1
    assert solution.iterations[2] > 10
    assert torch.equal(solution.x[:, 0], torch.zeros(50, dtype=F64))
    alone = conjugate_gradient(op, b[:, 2])
    torch.testing.assert_close(alone.x, solution.x[:, 2], rtol=1e-12, atol=1e-14)


def test_preconditioner_saves_steps() -> None:
    diagonal = torch.logspace(0, 6, 80, dtype=F64)
    op = Diagonal(diagonal) + LowRank(matrix(80, 2, F64))
    b = matrix(80, 1, F64, seed=1)
    plain = conjugate_gradient(op, b, max_iter=20)
    better = conjugate_gradient(op, b, preconditioner=Diagonal(1 / diagonal), max_iter=20)
    assert not plain.all_converged
    assert better.all_converged
    torch.testing.assert_close(better.x, torch.linalg.solve(op.dense(), b), rtol=1e-7, atol=1e-9)


def test_says_that_it_did_not_converge() -> None:
    solution = conjugate_gradient(with_spectrum(torch.logspace(-6, 0, 60, dtype=F64)), matrix(60, 1, F64), max_iter=5)
    assert not solution.all_converged
    assert solution.iterations.tolist() == [5]
    assert float(solution.residuals) > 1e-10


def test_says_when_curvature_is_negative() -> None:
    op = with_spectrum(torch.cat([torch.linspace(1, 2, 20), torch.tensor([-1.0])]).to(F64))
    bad = matrix(21, 2, F64)
    good = op @ torch.linalg.eigh(op.matrix).eigenvectors[:, -1:]
    solution = conjugate_gradient(op, torch.cat([bad, good], dim=1))
    assert solution.negative_curvature.tolist() == [True, True, False]
    assert solution.converged.tolist() == [False, False, True]
    assert torch.isfinite(solution.x).all()


def test_zero_operator_has_no_curvature() -> None:
    solution = conjugate_gradient((0.0 * Identity(4, dtype=F64)), torch.ones(4, dtype=F64))
    assert solution.negative_curvature.all()
    assert not solution.converged.any()
    assert torch.equal(solution.x, torch.zeros(4, dtype=F64))


def test_singular_operator() -> None:
    """A right side in the range is solved; one outside it is reported, and x stays finite."""
    u = matrix(30, 5, F64)
    op = LowRank(u)
    inside, outside = op @ matrix(30, 1, F64, seed=1), matrix(30, 1, F64, seed=2)
    solution = conjugate_gradient(op, torch.cat([inside, outside], dim=1), max_iter=100)
    assert solution.converged.tolist() == [True, False]
    assert torch.isfinite(solution.x).all()
    assert float(solution.residuals[1]) <= 1.0


def test_products_are_counted() -> None:
    asked = 0

    def product(x: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += x.shape[1]
        return torch.linspace(1, 2, 10, dtype=F64)[:, None] * x

    op = Function(product, None, 10, 10, dtype=F64, symmetric=True)
    assert conjugate_gradient(op, matrix(10, 3, F64)).products == asked


def test_refusals() -> None:
    b = torch.ones(3, dtype=F64)
    with pytest.raises(ValueError, match=r"needs a symmetric operator.*A @ A\.T"):
        conjugate_gradient(Dense(matrix(3, 3, F64)), b)
    with pytest.raises(ValueError, match="preconditioner needs a symmetric operator"):
        conjugate_gradient(Identity(3, dtype=F64), b, preconditioner=Dense(matrix(3, 3, F64)))
    with pytest.raises(ValueError, match="must be positive definite"):
        conjugate_gradient(Identity(3, dtype=F64), b, preconditioner=-Identity(3, dtype=F64))
    with pytest.raises(ValueError, match="got \\(4, 1\\)"):
        conjugate_gradient(Identity(3, dtype=F64), torch.ones(4, dtype=F64))
    with pytest.raises(TypeError, match="float64"):
        conjugate_gradient(Identity(3, dtype=F64), b.float())
    with pytest.raises(ValueError, match="finite"):
        conjugate_gradient(Diagonal(torch.tensor([1.0, float("nan"), 1.0], dtype=F64)), b)
