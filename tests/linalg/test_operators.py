"""Every concrete operator passes the conformance suite, in both dtypes and at random sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gramscope.linalg as linalg
from conformance import assert_operator_conforms
from gramscope.base.axes import Axes
from gramscope.linalg import (
    Dense,
    Diagonal,
    Function,
    HadamardGram,
    Identity,
    Kronecker,
    LinearOperator,
    LowRank,
)
from linalg.operator_cases import CASES, matrix

DTYPES = [torch.float64, torch.float32]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SIZES = st.integers(1, 6)
FEW = settings(max_examples=15, deadline=None, derandomize=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_conforms(name: str, dtype: torch.dtype, device: str) -> None:
    op, dense = CASES[name](dtype, device)
    assert_operator_conforms(op, dense)
    assert op.symmetric == (name.endswith(("symmetric", "_transpose")) or name in SYMMETRIC_BY_NATURE)


SYMMETRIC_BY_NATURE = {"identity", "zero_square", "diagonal", "hadamard_thin", "hadamard_empty"}


def test_cases_cover_every_public_operator() -> None:
    named = [getattr(linalg, name) for name in linalg.__all__]
    public = {x for x in named if isinstance(x, type) and issubclass(x, LinearOperator)}
    shown = {type(case(torch.float64, "cpu")[0]) for case in CASES.values()}
    assert shown == public - {LinearOperator}


@FEW
@given(sizes=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=3))
def test_kronecker_of_any_factors(sizes: list[tuple[int, int]]) -> None:
    factors = [matrix(r, c, torch.float64, seed=i) for i, (r, c) in enumerate(sizes)]
    dense = factors[0]
    for factor in factors[1:]:
        dense = torch.kron(dense, factor)
    assert_operator_conforms(Kronecker(*factors), dense)


@FEW
@given(rows=SIZES, cols=SIZES, rank=st.integers(0, 8), block=st.integers(1, 5))
def test_hadamard_by_every_route(rows: int, cols: int, rank: int, block: int) -> None:
    v, u = matrix(rows, rank, torch.float64), matrix(cols, rank, torch.float64, seed=1)
    a = matrix(rows, cols, torch.float64, seed=2)
    for inner in (Dense(a), Function(lambda x: a @ x, lambda y: a.mT @ y, rows, cols, dtype=a.dtype)):
        assert_operator_conforms(HadamardGram(v, inner, u, block=block), (v @ u.mT) * a)


def test_hadamard_thin_never_asks_for_the_whole_operator() -> None:
    asked: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.shape[1])
        return 2 * x

    inner = Function(product, None, 50, 50, dtype=torch.float64, symmetric=True)
    HadamardGram(matrix(50, 3, torch.float64), inner, block=6) @ matrix(50, 2, torch.float64)
    assert asked == [6]
    asked.clear()
    HadamardGram(matrix(50, 7, torch.float64), inner, block=6) @ matrix(50, 2, torch.float64)
    assert asked == [6, 6, 2]


def test_kronecker_shrinks_before_it_grows() -> None:
    asked: list[int] = []

    def narrow(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.shape[1])
        return x[:1]

    def pad(y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y, y.new_zeros((9, y.shape[1]))])

    shrink = Function(narrow, pad, 1, 10, dtype=torch.float64)
    grow = Dense(matrix(20, 2, torch.float64))
    Kronecker(grow, shrink) @ matrix(20, 1, torch.float64)
    assert asked == [2]


def test_float32_factors_multiply_in_float32() -> None:
    op = Kronecker(Diagonal(torch.ones(2)), Identity(3, dtype=torch.float32))
    assert (op @ torch.ones(6)).dtype == torch.float32


def test_operators_are_differentiable() -> None:
    u = matrix(4, 2, torch.float64).requires_grad_()
    x = matrix(4, 1, torch.float64, seed=1)
    (x.mT @ (HadamardGram(u, LowRank(u)) @ x)).sum().backward()
    expected = torch.autograd.grad((x.mT @ ((u @ u.mT) ** 2) @ x).sum(), u)[0]
    torch.testing.assert_close(u.grad, expected)


def test_dense_is_a_copy() -> None:
    op = Dense(torch.eye(2))
    op.dense().add_(1.0)
    assert torch.equal(op.matrix, torch.eye(2))


def test_to_scipy_solves_with_scipy() -> None:
    import numpy as np
    from scipy.sparse.linalg import svds

    op = LowRank(matrix(8, 3, torch.float32), matrix(6, 3, torch.float32, seed=1))
    bridge = op.to_scipy()
    assert bridge.shape == (8, 6)
    assert bridge.dtype == np.float32
    dense = op.dense().numpy()
    np.testing.assert_allclose(bridge @ np.eye(6), dense, atol=1e-5)
    np.testing.assert_allclose(bridge.T @ np.ones(8), dense.T @ np.ones(8), atol=1e-5)
    top = svds(bridge, k=2, return_singular_vectors=False, random_state=0)
    np.testing.assert_allclose(np.sort(top), np.sort(np.linalg.svd(dense)[1])[-2:], rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dense(torch.ones(3)), r"matrix of shape \(rows, cols\), got shape \(3,\)"),
        (lambda: Dense(torch.ones(2, 2).half()), "float32 or torch.float64, got torch.float16"),
        (lambda: Dense(torch.ones(2, 3), symmetric=True), "size 3 to match matrix|same axes on both sides"),
        (lambda: Dense(torch.ones(2, 2), rows=Axes(example=3)), "size 2 to match matrix, got Axes"),
        (lambda: Diagonal(torch.ones(2, 2)), r"shape \(n,\), got \(2, 2\)"),
        (lambda: LowRank(torch.ones(3, 2), torch.ones(3, 1)), "must share the rank"),
        (lambda: LowRank(torch.ones(3, 2), torch.ones(3, 2).double()), "share one dtype"),
        (lambda: Kronecker(), "at least one operator"),
        (lambda: Kronecker(torch.ones(2, 2), torch.ones(2, 2).double()), "share one dtype"),
        (lambda: HadamardGram(torch.ones(3, 1), torch.ones(3, 2)), r"got \(3, 1\) and \(3, 1\)"),
        (lambda: HadamardGram(torch.ones(3, 1), torch.ones(3, 3).double()), "share one dtype"),
        (
            lambda: HadamardGram(torch.ones(3, 1), torch.ones(3, 3), block=0),
            "block must be a whole number of at least 1",
        ),
        (lambda: Function(torch.neg, None, 2, 2, dtype=torch.float64), "transposed product, got None"),
        (
            lambda: Function(lambda x: x[:1], torch.neg, 2, 2, dtype=torch.float64) @ torch.ones(2).double(),
            r"must return shape \(2, 1\)",
        ),
        (lambda: Identity(Axes(a=-1), dtype=torch.float32), "size >= 0, got -1"),
    ],
)
def test_bad_parts_are_named(build, message: str) -> None:  # type: ignore[no-untyped-def]
    # Shape annotations, checked under pytest only, see some of these first; either way nothing is built.
    with pytest.raises((ValueError, TypeError)) as caught:
        build()
    if "jaxtyping" not in type(caught.value).__module__:
        caught.match(message)
