"""The cost model against brute-force counting of the operations that really run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.kernels.contractions import (
    HalfPiece,
    PositionPiece,
    Positions,
    RowPiece,
    Shape,
    cheapest,
    flops,
    price,
)
from references.counting import CountFlops

SMALL = st.integers(1, 5)


def counted(shape: Shape, method: str) -> int:
    """Operations of one way of contraction between n and m examples, group after group."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    c = 1 if shape.trace else shape.k
    out = torch.zeros(shape.n * c, shape.m * c)
    rows, cols = (0, shape.n), (0, shape.m)
    with CountFlops() as counter:
        for _ in range(shape.g):
            v, w = random(shape.n, shape.T, shape.i), random(shape.m, shape.T, shape.i)
            s, t = random(shape.n, shape.k, shape.T, shape.o), random(shape.m, shape.k, shape.T, shape.o)
            if method == "rows":
                left = torch.bmm(s.transpose(2, 3).reshape(shape.n, -1, shape.T), v).reshape(shape.n, shape.k, -1)
                right = torch.bmm(t.transpose(2, 3).reshape(shape.m, -1, shape.T), w).reshape(shape.m, shape.k, -1)
                RowPiece(left, right, shape.trace).add(out, rows, cols)
            elif method == "half":
                HalfPiece(Positions(v, w), s, t).add(out, rows, cols)
            else:
                PositionPiece(Positions(v, w), s, t, shape.trace).add(out, rows, cols)
    return counter.total


def methods(shape: Shape) -> list[str]:
    return ["rows", "positions"] if shape.T == 1 or shape.trace else ["rows", "positions", "half"]


@given(SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, st.booleans())
@settings(max_examples=60, deadline=None)
def test_model_equals_the_count(n, m, k, T, g, i, o, trace):
    shape = Shape(n, m, k, T, g, i, o, symmetric=False, trace=trace)
    for method in methods(shape):
        assert flops(shape, method) == counted(shape, method)


@given(SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_cheapest_by_the_model_is_the_cheapest_by_the_count(n, m, k, T, g, i, o, trace):
    shape = Shape(n, m, k, T, g, i, o, symmetric=False, trace=trace)
    prices = {method: counted(shape, method) * price(shape, method) / flops(shape, method) for method in methods(shape)}
    assert prices[cheapest(shape)] == pytest.approx(min(prices.values()))


def test_a_symmetric_kernel_counts_each_pair_once():
    shape = Shape(10, 10, 2, 3, 1, 4, 5, symmetric=True, trace=False)
    whole = Shape(10, 10, 2, 3, 1, 4, 5, symmetric=False, trace=False)
    assert flops(shape, "half") * 100 == flops(whole, "half") * 55


@pytest.mark.parametrize(
    ("shape", "method"),
    [
        # ResNet-18 for CIFAR, ten outputs, 256 examples: gradient rows where positions are many, else half.
        (Shape(256, 256, 10, 1024, 1, 576, 64, symmetric=True, trace=False), "rows"),
        (Shape(256, 256, 10, 64, 1, 2304, 256, symmetric=True, trace=False), "half"),
        (Shape(256, 256, 10, 16, 1, 4608, 512, symmetric=True, trace=False), "half"),
        # few positions of each example: their Gram matrices, which are large products
        (Shape(64, 64, 10, 4, 1, 256, 512, symmetric=True, trace=False), "positions"),
        # a dense layer: two Gram matrices
        (Shape(512, 512, 10, 1, 1, 1024, 1024, symmetric=True, trace=False), "positions"),
    ],
)
def test_choices_that_matter(shape, method):
    assert cheapest(shape) == method
