"""Sums, products and transposes: what they are, when they are symmetric, and what they refuse."""

import pytest
import torch

from gramscope.base.axes import Axes
from gramscope.linalg import (
    Adjoint,
    Composition,
    Dense,
    Diagonal,
    HadamardGram,
    Identity,
    Kronecker,
    LowRank,
    Sum,
)
from linalg.operator_cases import matrix

F64 = torch.float64
A = Dense(matrix(3, 3, F64))
B = Dense(matrix(3, 3, F64, seed=1))
S = LowRank(matrix(3, 2, F64, seed=2))
D = Diagonal(torch.arange(3, dtype=F64))


@pytest.mark.parametrize(
    ("op", "symmetric"),
    [
        (A, False),
        (A.T, False),
        (S.T, True),
        (S + D, True),
        (S + A, False),
        (A + A.T, True),
        (A + A + A.T, False),
        (A + B + A.T + B.T + S, True),
        (0.5 * A + 0.5 * A.T, True),
        (0.5 * A + 0.4 * A.T, False),
        (A + B.T, False),
        (2 * S, True),
        (-S, True),
        (S - D, True),
        (A @ A.T, True),
        (A.T @ A, True),
        (A @ A, False),
        (S @ S, True),
        (S @ D, False),
        (S @ D @ S, True),
        (A @ S @ A.T, True),
        (A @ B @ (A @ B).T, True),
        ((A @ B).T @ A @ B, True),
        ((2 * A) @ (2 * A).T, True),
        (A @ B @ A.T, False),
        ((2 * (A @ B)) @ (2 * (A @ B)).T, True),
        ((-(A @ B)) @ (-(A @ B)).T, True),
        (((A @ B) / 3).T @ ((A @ B) / 3), True),
        ((2 * A) @ (3 * A.T), True),
        (-(2 * A) @ S @ (A @ B @ (5 * B.T)).T, False),
        ((2 * (A @ B)) @ (2 * (B @ A)).T, False),
        (A @ B + (A @ B).T, True),
        (2 * (A @ B) + (2 * (A @ B)).T, True),
        (A @ B + (B @ A).T, False),
        (Kronecker(S, D), True),
        (Kronecker(S, A), False),
        (HadamardGram(matrix(3, 1, F64), S), True),
        (HadamardGram(matrix(3, 1, F64), A), False),
        (HadamardGram(matrix(3, 1, F64), S, matrix(3, 1, F64, seed=1)), False),
        ((0.0 * Identity(3, dtype=F64)), True),
        (LowRank(*2 * [torch.ones(3, 0, dtype=F64)], rows=Axes(a=3), cols=Axes(b=3)), False),
    ],
)
def test_symmetry_is_carried_on_and_true(op, symmetric: bool) -> None:  # type: ignore[no-untyped-def]
    assert op.symmetric is symmetric
    dense = op.dense()
    if symmetric:
        torch.testing.assert_close(dense, dense.mT, rtol=1e-13, atol=1e-13)
        assert op.adjoint() is op
    assert op.T.symmetric is symmetric


def test_transposes_are_not_stacked() -> None:
    assert A.T.T is A
    assert isinstance(A.T, Adjoint)
    assert isinstance((A @ B).T, Composition)


def test_sums_and_products_are_flat() -> None:
    total = A + (B + S) + D
    assert isinstance(total, Sum)
    assert total.terms == (A, B, S, D)
    product = A @ (B @ S) @ D
    assert isinstance(product, Composition)
    assert product.factors == (A, B, S, D)


def test_products_associate_towards_the_vector() -> None:
    """A product with a vector never forms a matrix: (u vᵀ)(u vᵀ) x costs three dot products."""
    u = LowRank(matrix(2000, 1, F64), matrix(2000, 1, F64, seed=1))
    x = matrix(2000, 1, F64, seed=2)
    torch.testing.assert_close((u @ u) @ x, u @ (u @ x))


def test_names_survive_algebra() -> None:
    kernel = Dense(matrix(6, 6, F64), Axes(example=3, output=2), Axes(example=3, output=2))
    assert (kernel + Dense(matrix(6, 6, F64))).rows == Axes(example=3, output=2)
    assert (Dense(matrix(6, 6, F64)) + kernel).cols == Axes(example=3, output=2)
    assert Kronecker(Identity(Axes(output=2), dtype=F64), D).rows == Axes.anonymous(6)


def test_errors_name_the_axes() -> None:
    left = Dense(matrix(2, 6, F64), Axes(output=2), Axes(example=3, time=2))
    right = Dense(matrix(6, 2, F64), Axes(time=2, example=3), Axes(output=2))
    with pytest.raises(ValueError, match=r"Axes\(example=3, time=2\) and B.rows = Axes\(time=2, example=3\)"):
        left @ right
    with pytest.raises(ValueError, match=r"sizes differ.*Dense \(2, 6\)"):
        left @ A
    with pytest.raises(ValueError, match="terms of a Sum must have the same axes"):
        left + left.T
    with pytest.raises(
        ValueError, match=r"match the columns Axes\(example=3, time=2\) of Dense, got \(3, 2\)"
    ) as shape:
        left @ matrix(3, 2, F64)
    assert "A.cols.flatten(x)" in str(shape.value)
    with pytest.raises(TypeError, match=r"float64 on cpu like Dense, got torch.float32"):
        left @ torch.ones(6)
    with pytest.raises(TypeError, match="share one dtype and device"):
        A + Dense(torch.ones(3, 3))


@pytest.mark.parametrize("other", [1, "x", None, [1.0]])
def test_meaningless_arithmetic_is_refused(other: object) -> None:
    with pytest.raises(TypeError):
        A + other
    with pytest.raises(TypeError):
        A - other
    with pytest.raises(TypeError):
        A @ other
    if other != 1:
        with pytest.raises(TypeError):
            A * other
        with pytest.raises(TypeError):
            A / other
    with pytest.raises(TypeError):
        A * torch.ones(3)


def test_scalar_keeps_its_gradient() -> None:
    c = torch.tensor(2.0, dtype=F64, requires_grad=True)
    ((c * D) @ torch.ones(3, dtype=F64)).sum().backward()
    assert c.grad == 3.0
