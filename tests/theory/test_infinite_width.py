"""NNGP and NTK of pairs against the recursions of all four samples, and against wide random networks."""

import pytest
import torch

from gramscope.base.errors import InputError
from gramscope.theory import FiniteWidthMLP

F64 = torch.float64


@pytest.mark.parametrize("activation", ["tanh", "relu", "erf", "gelu"])
def test_agrees_with_the_flow(activation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=F64)
    mlp = FiniteWidthMLP(
        [4, 30, 30, 2], activation, C_b=[0.1, 0.2, 0.0], C_W=1.5, lambda_b=0.3, lambda_W=[1.0, 0.5, 2.0]
    )
    flow, found = mlp.flow(x), mlp.infinite_width(x)
    # Both refine their expectations to 1e-10.
    torch.testing.assert_close(found.nngp, flow[3].K, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.ntk, flow[3].Theta, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_two_sets_are_a_block_of_one(activation: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 3, dtype=F64)
    x[5] = -x[0]
    x[4] = 0
    mlp = FiniteWidthMLP([3, 8, 8, 1], activation, C_b=0.1, C_W=1.2)
    whole, block = mlp.infinite_width(x), mlp.infinite_width(x[:2], x[2:])
    torch.testing.assert_close(block.nngp, whole.nngp[:2, 2:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(block.ntk, whole.ntk[:2, 2:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(whole.ntk, whole.ntk.T, rtol=1e-9, atol=1e-10)
    assert float(torch.linalg.eigvalsh(whole.nngp)[0]) > -1e-12


def test_agrees_with_a_wide_network() -> None:
    """Mean product of outputs over 400 units of a layer of width 2,000: both errors are a few percent."""
    torch.manual_seed(2)
    x, n = torch.randn(2, 3, dtype=F64), 2000
    first = torch.randn(n, 3, dtype=F64) * (1.3 / 3) ** 0.5
    second = torch.randn(4000, n, dtype=F64) * (1.3 / n) ** 0.5
    outputs = second @ torch.tanh(first @ x.T)
    found = FiniteWidthMLP([3, n, 1], "tanh", C_W=1.3).infinite_width(x)
    torch.testing.assert_close(outputs.T @ outputs / 4000, found.nngp, rtol=0, atol=0.06 * float(found.nngp.max()))


def test_refusals() -> None:
    mlp = FiniteWidthMLP([3, 8, 1])
    with pytest.raises(InputError, match="x2 must have the 3 features"):
        mlp.infinite_width(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(InputError, match="Add a batch axis"):
        mlp.infinite_width(torch.ones(3))
    assert repr(mlp.infinite_width(torch.eye(3))).startswith("InfiniteWidthKernels(nngp and ntk of 3 x 3 inputs")
