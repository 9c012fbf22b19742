"""What solvers refuse, and how they say so; wrong types in a process without runtime checks of annotations."""

import numpy as np
import pytest
import torch

from fresh import run_after_torch
from gramscope.base.checks import check_counts
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.rng import stream
from gramscope.linalg import Dense, Diagonal, Identity, conjugate_gradient, eigenvalues_top
from gramscope.linalg.arguments import require_operator

F64 = torch.float64
EYE = Identity(4, dtype=F64)

WRONG_TYPES = """
import torch, gramscope.linalg as L
from gramscope.base.errors import GramscopeError
matrix, op = torch.eye(4), L.Identity(4, dtype=torch.float64)
calls = [
    lambda: L.hutchinson(matrix, 8), lambda: L.hutchpp(matrix, 8), lambda: L.xtrace(matrix, 8),
    lambda: L.eigenvalues_top(matrix, 1), lambda: L.conjugate_gradient(matrix, matrix[0]),
    lambda: L.one_sided_trace(matrix, 4),
    lambda: L.hutchinson(op, 2.5), lambda: L.xtrace(op, "a"), lambda: L.hutchpp(op, 8.5),
    lambda: L.one_sided_trace(op, 2.5),
    lambda: L.eigenvalues_top(op, 1.5), lambda: L.hutchinson(op, 8, seed="x"), lambda: L.xtrace(op, 8, seed=None),
    lambda: L.eigenvalues_top(op, 1, seed=1.5), lambda: L.one_sided_trace(op, 4, seed="x"),
    lambda: L.eigenvalues_top(op, 1, max_products=0), lambda: L.eigenvalues_top(op, 1, max_basis="a"),
    lambda: L.conjugate_gradient(op, torch.ones(4, dtype=torch.float64), tol="a"),
]
for place, call in enumerate(calls):
    try:
        call()
    except GramscopeError:
        continue
    except Exception as error:
        print(place, type(error).__name__, error)
    else:
        print(place, "accepted")
"""


def test_wrong_types_are_named() -> None:
    assert run_after_torch(WRONG_TYPES)[0] == ""


def test_messages() -> None:
    with pytest.raises(UnsupportedError, match=r"xtrace needs a LinearOperator, got Tensor. Wrap a matrix: Dense"):
        require_operator(torch.eye(3), "xtrace")
    with pytest.raises(InputError, match=r"k must be a whole number of at least 1, got 1.5"):
        check_counts(1, k=1.5)
    with pytest.raises(InputError, match="seed must be a whole number from 0 to 9223372036854775807, got 'x'"):
        stream("x", "a")
    assert stream(np.int64(3), "a").initial_seed() == stream(3, "a").initial_seed()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_right_sides_must_be_finite(bad: float) -> None:
    b = torch.ones(4, dtype=F64)
    b[2] = bad
    with pytest.raises(InputError, match="b must be finite, but 1 of 4 entries"):
        conjugate_gradient(EYE, b)


@pytest.mark.parametrize("tol", [-1.0, float("nan"), float("inf")])
def test_tolerances_must_be_relative_residuals(tol: float) -> None:
    for call in (
        lambda: conjugate_gradient(EYE, torch.ones(4, dtype=F64), tol=tol),
        lambda: eigenvalues_top(EYE, 1, tol=tol),
    ):
        with pytest.raises(InputError, match="tol must be one finite number at least 0"):
            call()
    with pytest.raises(InputError, match="max_iter must be a whole number of at least 0"):
        conjugate_gradient(EYE, torch.ones(4, dtype=F64), max_iter=-1)


def test_both_ends_of_a_number() -> None:
    with pytest.raises(InputError, match="'both' eigenvalues need an operator of size at least 2, got one of size 1"):
        eigenvalues_top(Diagonal(torch.ones(1)), 1, end="both")


def test_numpy_arrays_are_named() -> None:
    op, array = Dense(torch.eye(3)), np.eye(3, dtype=np.float32)
    for product in (lambda: op @ array, lambda: array @ op, lambda: op @ array[0]):
        with pytest.raises(
            UnsupportedError, match=r"torch\.Tensor, got ndarray. Convert it yourself: torch\.as_tensor"
        ):
            product()
    assert (np.float64(2.0) * op).dense().tolist() == (op * 2.0).dense().tolist()
    with pytest.raises(TypeError):
        op + array
