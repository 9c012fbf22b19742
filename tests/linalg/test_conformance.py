"""The conformance suite can fail: each broken operator breaks one promise, and is caught."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conformance import assert_close, assert_operator_conforms
from gramscope.base.axes import Axes
from gramscope.linalg import Dense, Identity, LinearOperator
from linalg.operator_cases import matrix

A = matrix(4, 3, torch.float64)
SQUARE = matrix(4, 4, torch.float64, seed=1)


class _Honest(Dense):
    """Correct; each test below spoils one method of it."""


class _WrongAdjoint(Dense):
    def _adjoint_matmat(self, x: Tensor) -> Tensor:
        return 1.001 * super()._adjoint_matmat(x)


class _WrongAdjointSquare(Dense):
    def _adjoint_matmat(self, x: Tensor) -> Tensor:
        return self._matmat(x)


class _WrongDtype(Dense):
    def _matmat(self, x: Tensor) -> Tensor:
        return super()._matmat(x).float()


class _WrongDense(Dense):
    def dense(self, *, block: int = 256) -> Tensor:
        return super().dense(block=block).roll(1, 0)


class _NotLinear(Dense):
    def _matmat(self, x: Tensor) -> Tensor:
        return super()._matmat(x) + 1e-6


class _Saturating(Dense):
    def dense(self, *, block: int = 256) -> Tensor:
        return LinearOperator.dense(self, block=block)

    def _matmat(self, x: Tensor) -> Tensor:
        return super()._matmat(x).clamp(-1.0, 1.0)


class _NotANumber(Dense):
    def _matmat(self, x: Tensor) -> Tensor:
        return super()._matmat(x) * float("nan")


class _Overwrites(Dense):
    def _matmat(self, x: Tensor) -> Tensor:
        product = super()._matmat(x)
        x.zero_()
        return product


class _ReturnsItsArgument(Identity):
    def _matmat(self, x: Tensor) -> Tensor:
        return x


class _FailsOnNoColumns(Dense):
    def _matmat(self, x: Tensor) -> Tensor:
        assert x.shape[1] > 0, "no columns"
        return super()._matmat(x)


class _ForgetsOneColumn(Dense):
    def _matmat(self, x: Tensor) -> Tensor:
        product = super()._matmat(x)
        product[:, 2:] = 0.0
        return product


class _Casts(Dense):
    def _check_operand(self, x: Tensor, ndim: int) -> None:
        x.data = x.data.to(self.dtype)
        super()._check_operand(x, ndim)


class _AcceptsAnySize(Dense):
    def _check_operand(self, x: Tensor, ndim: int) -> None:
        x.data = x.data.to(self.dtype)[: self.cols.size]


class _WrongAxes(Dense):
    def adjoint(self) -> LinearOperator:
        return Dense(self.matrix.mT, Axes(wrong=self.cols.size), self.rows)


class _FalselySymmetricProduct(Dense):
    def __matmul__(self, other):  # type: ignore[no-untyped-def]
        product = super().__matmul__(other)
        if isinstance(product, LinearOperator):
            product.symmetric = product.rows.size == product.cols.size
        return product


BROKEN: dict[str, tuple[Callable[[], LinearOperator], str]] = {
    "wrong adjoint": (lambda: _WrongAdjoint(A), "⟨A x, y⟩"),
    "adjoint of a square operator forgotten": (lambda: _WrongAdjointSquare(SQUARE), "⟨A x, y⟩"),
    "wrong dtype": (lambda: _WrongDtype(A), "must be torch.float64, got torch.float32"),
    "wrong dense": (lambda: _WrongDense(A), "matmat of 1 columns and dense @ x"),
    "affine": (lambda: _NotLinear(A), "matmat of 1 columns and dense @ x"),
    "saturating": (lambda: _Saturating(3 * A), "differ by"),
    "falsely symmetric": (lambda: Dense(SQUARE, symmetric=True), "dense.T @ Y|declared symmetric"),
    "falsely symmetric product": (lambda: _FalselySymmetricProduct(SQUARE), "held to be symmetric"),
    "not a number": (lambda: _NotANumber(A), "differ by nan"),
    "overwrites its argument": (lambda: _Overwrites(A), "neither change its argument|and dense @ x"),
    "returns its argument": (lambda: _ReturnsItsArgument(3, dtype=torch.float64), "return a view of it"),
    "forgets a column": (lambda: _ForgetsOneColumn(A), "matmat of 3 columns"),
    "fails on no columns": (lambda: _FailsOnNoColumns(A), "no columns"),
    "casts silently": (lambda: _Casts(A), "another dtype must be refused"),
    "accepts any size": (lambda: _AcceptsAnySize(A), "must be refused|must raise"),
    "wrong axes of the adjoint": (lambda: _WrongAxes(A, Axes(a=4), Axes(b=3)), "swap rows and cols"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_operator_is_caught(name: str) -> None:
    build, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        assert_operator_conforms(build())


def test_another_matrix_is_caught() -> None:
    with pytest.raises(AssertionError, match="expected matrix"):
        assert_operator_conforms(Dense(A), A + 1e-9)


@pytest.mark.parametrize("cls", [_Honest, Dense])
def test_the_unspoilt_operator_passes(cls: type[Dense]) -> None:
    assert_operator_conforms(cls(A), A)
    assert_operator_conforms(cls(SQUARE), SQUARE)


def test_float32_is_held_to_its_rounding() -> None:
    spoilt = A.float() * (1 + 1e-4)
    with pytest.raises(AssertionError):
        assert_operator_conforms(Dense(spoilt), A.float())


def test_assert_close_refuses_other_shapes_and_nan() -> None:
    with pytest.raises(AssertionError, match="shapes"):
        assert_close(torch.ones(2), torch.ones(1), 1.0, 1.0, "a and b")
    with pytest.raises(AssertionError, match="nan"):
        assert_close(torch.full((1,), torch.nan), torch.ones(1), 1.0, 1.0, "a and b")
