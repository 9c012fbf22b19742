"""Lanczos and block Krylov against dense eigenvalues, with honest residuals."""

import pytest
import torch
from torch import Tensor

from gramscope.linalg import (
    Dense,
    Diagonal,
    Function,
    Identity,
    Kronecker,
    LinearOperator,
    LowRank,
    RitzPairs,
    Zero,
    eigenvalues_top,
    lanczos,
    tridiagonalise,
)
from linalg.operator_cases import matrix, with_spectrum

F64 = torch.float64


def assert_pairs_are_true(op: LinearOperator, pairs: RitzPairs, tol: float) -> None:
    """Raise unless the vectors are orthonormal and the stated residuals are those of the pairs."""
    true = (op.matmat(pairs.vectors).double() - pairs.vectors.double() * pairs.values).norm(dim=0)
    scale = float(pairs.values.abs().max()) + 1e-300
    assert float((true - pairs.residuals).abs().max()) <= tol * scale, (true, pairs.residuals)
    overlap = pairs.vectors.double().mT @ pairs.vectors.double()
    assert float((overlap - torch.eye(len(overlap), dtype=F64)).abs().max()) <= tol, "vectors are not orthonormal"
    assert pairs.vectors.dtype == op.dtype
    assert pairs.values.dtype == F64


def test_assert_pairs_are_true_can_fail() -> None:
    op = Diagonal(torch.tensor([2.0, 1.0], dtype=F64))
    good = eigenvalues_top(op, 1)
    bad = RitzPairs(good.values + 0.1, good.vectors, good.residuals, good.converged, 1, 1)
    with pytest.raises(AssertionError):
        assert_pairs_are_true(op, bad, 1e-10)
    bad = RitzPairs(good.values, good.vectors * 1.1, good.residuals, good.converged, 1, 1)
    with pytest.raises(AssertionError, match="orthonormal"):
        assert_pairs_are_true(op, bad, 1e-10)


class TestLanczos:
    def test_factorisation_holds(self) -> None:
        op = with_spectrum(torch.linspace(-1, 2, 40, dtype=F64))
        known = tridiagonalise(op, 12, start=matrix(40, 1, F64)[:, 0])
        off = op.matmat(known.basis) - known.basis @ known.matrix()
        assert float(off[:, :-1].norm()) < 1e-13
        assert abs(float(off[:, -1].norm()) - known.residual) < 1e-13
        assert not known.invariant

    def test_extremes_converge_first_and_the_rest_say_so(self) -> None:
        values = torch.cat([torch.linspace(0, 1, 58), torch.tensor([3.0, 5.0])]).to(F64)
        op = with_spectrum(values)
        pairs = lanczos(op, 25, seed=1)
        assert_pairs_are_true(op, pairs, 1e-12)
        assert pairs.converged[:2].all()
        assert not pairs.all_converged
        torch.testing.assert_close(pairs.values[:2], torch.tensor([5.0, 3.0], dtype=F64), rtol=1e-12, atol=1e-12)

    def test_orthogonal_after_convergence(self) -> None:
        """The bare recurrence would grow ghost copies of the top eigenvalue here."""
        op = with_spectrum(0.5 ** torch.arange(50, dtype=F64))
        pairs = lanczos(op, 50)
        assert_pairs_are_true(op, pairs, 1e-12)
        assert int((pairs.values > 0.9).sum()) == 1

    def test_stops_on_an_invariant_space(self) -> None:
        op = Diagonal(torch.tensor([4.0, 4.0, 4.0, 1.0, 1.0], dtype=F64))
        known = tridiagonalise(op, 5, start=torch.ones(5, dtype=F64))
        assert known.invariant
        assert len(known.diagonal) == 2
        assert lanczos(op, 5).values.round(decimals=10).tolist() == [4.0, 1.0]

    def test_zero_and_one_dimensional_operators(self) -> None:
        assert lanczos(Zero(4, 4, dtype=F64), 3).values.tolist() == [0.0]
        assert lanczos(Zero(4, 4, dtype=F64), 3).all_converged
        torch.testing.assert_close(lanczos(3 * Identity(1, dtype=F64), 9).values, torch.tensor([3.0], dtype=F64))

    def test_float32_on_a_float32_operator(self) -> None:
        op = with_spectrum(torch.linspace(0, 1, 30) ** 4)
        pairs = lanczos(op, 30)
        assert_pairs_are_true(op, pairs, 1e-5)
        assert abs(float(pairs.values[0]) - 1.0) < 1e-5

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="symmetric"):
            lanczos(Dense(matrix(3, 3, F64)), 2)
        with pytest.raises(ValueError, match="steps must be at least 1"):
            lanczos(Identity(3, dtype=F64), 0)
        with pytest.raises(ValueError, match="not zero"):
            lanczos(Identity(3, dtype=F64), 1, start=torch.zeros(3, dtype=F64))
        with pytest.raises(ValueError, match="size at least 1"):
            lanczos(Zero(0, 0, dtype=F64), 1)
        with pytest.raises(ValueError, match="finite"):
            lanczos(Diagonal(torch.tensor([1.0, float("nan")])), 2)


class TestEigenvaluesTop:
    @pytest.mark.parametrize("end", ["largest", "smallest", "both"])
    @pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
    def test_agrees_with_dense(self, end: str, dtype: torch.dtype) -> None:
        values = torch.cat([torch.linspace(-3, 2, 80), torch.tensor([4.0, 6.0, -5.0])]).to(dtype)
        op = with_spectrum(values)
        exact = torch.linalg.eigvalsh(op.matrix.double()).flip(0)
        pairs = eigenvalues_top(op, 4, end=end)
        tol = 1e-9 if dtype == F64 else 1e-4
        wanted = {"largest": exact[:4], "smallest": exact[-4:], "both": torch.cat([exact[:4], exact[-4:]])}[end]
        torch.testing.assert_close(pairs.values, wanted, rtol=tol, atol=tol)
        assert pairs.all_converged
        assert_pairs_are_true(op, pairs, 1e-11 if dtype == F64 else 1e-5)

    def test_finds_every_copy_of_a_multiple_eigenvalue(self) -> None:
        values = torch.cat([torch.full((7,), 2.0), torch.linspace(0, 1, 60)]).to(F64)
        pairs = eigenvalues_top(with_spectrum(values), 8)
        torch.testing.assert_close(pairs.values[:7], torch.full((7,), 2.0, dtype=F64), rtol=1e-10, atol=0)
        assert abs(float(pairs.values[7]) - 1.0) < 1e-9

    def test_restarts_bound_the_basis_and_still_converge(self) -> None:
        op = with_spectrum(torch.linspace(0, 1, 200, dtype=F64) ** 3)
        width = 0

        def watched(x: Tensor) -> Tensor:
            nonlocal width
            width = max(width, x.shape[1])
            return op.matrix @ x

        seen = Function(watched, None, 200, 200, dtype=F64, symmetric=True)
        pairs = eigenvalues_top(seen, 3, max_basis=21, max_iter=400)
        assert pairs.all_converged
        assert pairs.iterations > 10
        assert width <= 7
        assert_pairs_are_true(op, pairs, 1e-11)
        torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(op.matrix).flip(0)[:3], rtol=1e-10, atol=0)

    def test_reports_what_did_not_converge(self) -> None:
        op = with_spectrum(torch.linspace(0.99, 1, 300, dtype=F64))
        pairs = eigenvalues_top(op, 3, max_iter=2)
        assert not pairs.all_converged
        assert pairs.iterations == 2
        assert_pairs_are_true(op, pairs, 1e-12)
        assert (pairs.residuals[~pairs.converged] > 0).all()

    @pytest.mark.parametrize("end", ["largest", "smallest", "both"])
    @pytest.mark.parametrize(
        ("op", "values"),
        [
            (Identity(9, dtype=F64), [1.0] * 9),
            (Zero(9, 9, dtype=F64), [0.0] * 9),
            (LowRank(torch.ones(9, 1, dtype=F64)), [9.0] + [0.0] * 8),
            (-1 * LowRank(torch.ones(9, 1, dtype=F64)), [0.0] * 8 + [-9.0]),
            (Diagonal(torch.tensor([1.0, -1.0] + [0.0] * 7, dtype=F64)), [1.0] + [0.0] * 7 + [-1.0]),
        ],
    )
    def test_invariant_spaces(self, op: LinearOperator, values: list[float], end: str) -> None:
        pairs = eigenvalues_top(op, 3, end=end, oversample=0)
        wanted = {"largest": values[:3], "smallest": values[-3:], "both": values[:3] + values[-3:]}[end]
        torch.testing.assert_close(pairs.values, torch.tensor(wanted, dtype=F64), rtol=0, atol=1e-12)
        assert_pairs_are_true(op, pairs, 1e-12)
        assert pairs.all_converged

    def test_whole_spectrum_of_a_small_operator(self) -> None:
        op = with_spectrum(torch.linspace(-1, 1, 6, dtype=F64))
        torch.testing.assert_close(eigenvalues_top(op, 6).values, torch.linspace(1, -1, 6, dtype=F64))

    def test_tiny_and_huge_scales(self) -> None:
        for scale in (1e-30, 1e30):
            op = scale * with_spectrum(torch.linspace(0, 1, 30, dtype=F64))
            pairs = eigenvalues_top(op, 2)
            assert pairs.all_converged
            assert abs(float(pairs.values[0]) / scale - 1) < 1e-10

    def test_kronecker_without_its_matrix(self) -> None:
        a, b = (
            with_spectrum(torch.arange(1, 31, dtype=F64)),
            with_spectrum(torch.arange(1, 31, dtype=F64), seed=101),
        )
        pairs = eigenvalues_top(Kronecker(a, b), 3, end="largest")
        torch.testing.assert_close(pairs.values, torch.tensor([900.0, 870.0, 870.0], dtype=F64), rtol=1e-9, atol=0)

    def test_seed_and_streams(self) -> None:
        op = with_spectrum(torch.linspace(0, 1, 40, dtype=F64))
        before, default = torch.random.get_rng_state(), torch.get_default_dtype()
        first, again = eigenvalues_top(op, 2, seed=3), eigenvalues_top(op, 2, seed=3)
        lanczos(op, 5, seed=3)
        assert torch.equal(first.vectors, again.vectors)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert torch.get_default_dtype() == default

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="symmetric"):
            eigenvalues_top(Dense(matrix(5, 5, F64)), 1)
        with pytest.raises(ValueError, match="between 1 and 5"):
            eigenvalues_top(Identity(5, dtype=F64), 6)
        with pytest.raises(ValueError, match="between 1 and 2"):
            eigenvalues_top(Identity(5, dtype=F64), 3, end="both")
        with pytest.raises(ValueError, match="oversample must be at least 0"):
            eigenvalues_top(Identity(50, dtype=F64), 3, oversample=-1)
        with pytest.raises(ValueError, match="max_basis must be at least"):
            eigenvalues_top(Identity(50, dtype=F64), 3, max_basis=10)
        with pytest.raises(ValueError, match="finite"):
            eigenvalues_top(Diagonal(torch.tensor([1.0, float("inf"), 0.0])), 1)
