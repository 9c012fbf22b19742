"""The top of a spectrum against dense eigenvalues and SciPy's eigsh, with honest residuals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor

from gramscope.linalg import (
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LinearOperator,
    LowRank,
    RitzPairs,
    eigenvalues_top,
)
from gramscope.linalg.eigen import KrylovSpace
from linalg.operator_cases import matrix, with_spectrum

F64 = torch.float64


def assert_pairs_are_true(op: LinearOperator, pairs: RitzPairs, tol: float) -> None:
    """Raise unless the vectors are orthonormal and the stated residuals are those of the pairs."""
    true = (op.matmat(pairs.vectors).double() - pairs.vectors.double() * pairs.values).norm(dim=0)
    scale = float(torch.linalg.matrix_norm(op.dense().double(), 2)) + 1e-300
    assert float((true - pairs.residuals).abs().max()) <= tol * scale, (true, pairs.residuals)
    overlap = pairs.vectors.double().mT @ pairs.vectors.double()
    assert float((overlap - torch.eye(len(overlap), dtype=F64)).abs().max()) <= tol, "vectors are not orthonormal"
    assert pairs.vectors.dtype == op.dtype
    assert pairs.values.dtype == F64


def test_assert_pairs_are_true_can_fail() -> None:
    op = Diagonal(torch.tensor([2.0, 1.0], dtype=F64))
    good = eigenvalues_top(op, 1)
    bad = RitzPairs(good.values + 0.1, good.vectors, good.residuals, good.converged, 1)
    with pytest.raises(AssertionError):
        assert_pairs_are_true(op, bad, 1e-10)
    bad = RitzPairs(good.values, good.vectors * 1.1, good.residuals, good.converged, 1)
    with pytest.raises(AssertionError, match="orthonormal"):
        assert_pairs_are_true(op, bad, 1e-10)


class Counted(Dense):
    """A symmetric matrix that counts its products."""

    products = 0

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix, symmetric=True)

    def _matmat(self, x: Tensor) -> Tensor:
        self.products += x.shape[1]
        return super()._matmat(x)


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

    def test_restarts_bound_the_basis_and_still_converge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        op = with_spectrum(torch.linspace(0, 1, 200, dtype=F64) ** 3)
        made: list[KrylovSpace] = []
        start = KrylovSpace.__init__
        monkeypatch.setattr(KrylovSpace, "__init__", lambda space, *args: (made.append(space), start(space, *args))[1])
        pairs = eigenvalues_top(op, 3, max_basis=8)
        assert pairs.all_converged
        assert pairs.products > 50
        assert made[0].basis.shape == (9, 200)
        assert_pairs_are_true(op, pairs, 1e-11)
        torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(op.matrix).flip(0)[:3], rtol=1e-10, atol=0)

    def test_no_more_products_than_scipy(self) -> None:
        """At SciPy's own criterion, relative to each eigenvalue; the search for copies is within the fifth allowed."""
        for values in (1 / torch.arange(1, 301, dtype=F64), torch.linspace(0, 1, 300, dtype=F64) ** 2):
            counted = Counted(with_spectrum(values).matrix)
            theirs = eigsh(counted.to_scipy(), k=5, tol=1e-6, v0=matrix(300, 1, F64)[:, 0].numpy())[0]
            used, least = counted.products, float(theirs.min() / theirs.max())
            found = eigenvalues_top(counted, 5, tol=1e-6 * least)
            assert found.products == counted.products - used
            assert found.products <= 1.2 * used
            torch.testing.assert_close(found.values.flip(0), torch.from_numpy(theirs), rtol=1e-9, atol=0)

    @given(
        # In quarters: a copy nearer to the next eigenvalue than about a tenth of the spectrum may be missed.
        values=st.lists(st.integers(-4, 4).map(lambda v: v / 4), min_size=6, max_size=40),
        k=st.integers(1, 3),
        end=st.sampled_from(["largest", "smallest", "both"]),
        seed=st.integers(0, 5),
    )
    @settings(max_examples=30, deadline=None)
    def test_random_spectra_with_multiple_eigenvalues(self, values: list[float], k: int, end: str, seed: int) -> None:
        exact = torch.tensor(sorted(values, reverse=True), dtype=F64)
        op = with_spectrum(exact, seed=seed)
        pairs = eigenvalues_top(op, k, end=end, seed=seed)
        wanted = {"largest": exact[:k], "smallest": exact[-k:], "both": torch.cat([exact[:k], exact[-k:]])}[end]
        # The residual allowed is 4e-11 of the greatest; an eigenvalue is nearer than its residual.
        torch.testing.assert_close(pairs.values, wanted, rtol=0, atol=1e-10)
        assert_pairs_are_true(op, pairs, 1e-10)

    def test_residuals_after_a_search_count_what_was_dropped(self) -> None:
        """At a loose tolerance the dropped couplings are the residuals, and true ones agree with them."""
        op = with_spectrum(1 / torch.arange(1, 201, dtype=F64))
        pairs = eigenvalues_top(op, 6, tol=1e-2)
        true = (op.matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
        assert float(true.max()) > 1e-6
        torch.testing.assert_close(pairs.residuals, true, rtol=0.2, atol=1e-12)

    def test_the_search_ends_in_a_dense_bulk(self) -> None:
        """At a loose tolerance each search moves the values a little; without an end it took all products allowed."""
        values = torch.cat([torch.arange(2, 10, dtype=F64), torch.linspace(0, 1.5, 1992, dtype=F64)])
        pairs = eigenvalues_top(Diagonal(values), 50, tol=1e-3)
        assert pairs.all_converged
        assert pairs.products < 1500

    def test_reports_what_did_not_converge(self) -> None:
        op = with_spectrum(torch.linspace(0.99, 1, 300, dtype=F64))
        pairs = eigenvalues_top(op, 3, max_products=7)
        assert not pairs.all_converged
        assert pairs.products == 7
        assert_pairs_are_true(op, pairs, 1e-12)
        assert (pairs.residuals[~pairs.converged] > 0).all()
        assert "of 3 converged, 7 products" in repr(pairs)

    @pytest.mark.parametrize("end", ["largest", "smallest", "both"])
    @pytest.mark.parametrize(
        ("op", "values"),
        [
            (Identity(9, dtype=F64), [1.0] * 9),
            ((0.0 * Identity(9, dtype=F64)), [0.0] * 9),
            (LowRank(torch.ones(9, 1, dtype=F64)), [9.0] + [0.0] * 8),
            (-1 * LowRank(torch.ones(9, 1, dtype=F64)), [0.0] * 8 + [-9.0]),
            (Diagonal(torch.tensor([1.0, -1.0] + [0.0] * 7, dtype=F64)), [1.0] + [0.0] * 7 + [-1.0]),
        ],
    )
    def test_invariant_spaces(self, op: LinearOperator, values: list[float], end: str) -> None:
        pairs = eigenvalues_top(op, 3, end=end)
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
        with pytest.raises(ValueError, match="max_products must be a whole number of at least 3"):
            eigenvalues_top(Identity(50, dtype=F64), 3, max_products=2)
        with pytest.raises(ValueError, match="max_basis must be at least"):
            eigenvalues_top(Identity(50, dtype=F64), 3, max_basis=4)
        with pytest.raises(ValueError, match="finite"):
            eigenvalues_top(Diagonal(torch.tensor([1.0, float("inf"), 0.0])), 1)
