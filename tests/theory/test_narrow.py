"""Kinks and inputs at small angles: every digit of every tensor, down to where two inputs are one."""

from decimal import Decimal

import mpmath
import numpy as np
import pytest
import torch

from gramscope.theory.activation_functions import Kinked
from gramscope.theory.decimal_arithmetic import Decimals
from gramscope.theory.finite_width import FiniteWidthMLP
from gramscope.theory.gaussian_expectations import gaussian_moments
from gramscope.theory.orthant import four_signs
from references.finite_width import TENSORS, plane_flow
from references.orthants import four_signs_of_tables

RATES = {"C_b": 0.05, "C_W": 1.7, "lambda_b": 0.4, "lambda_W": 0.9}


def two_inputs(distance, side=1.0):
    return torch.tensor([[1.0, 0.5], [side, side * 0.5 + distance]], dtype=torch.float64)


def assert_layers_equal(layer, want, tolerance, zero=1e-300):
    for name in TENSORS:
        expected = torch.tensor(want[name].astype(np.float64))
        torch.testing.assert_close(
            getattr(layer, name), expected, rtol=tolerance, atol=zero, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 3e-6, 1e-6, 1e-9])
@pytest.mark.parametrize(
    ("slopes", "side", "C_b"), [((1.0, 0.0), 1.0, 0.05), ((1.0, 0.3), 1.0, 0.0), ((1.0, -0.4), -1.0, 0.0)]
)
def test_two_close_inputs_against_many_digits(distance, slopes, side, C_b):
    """A of layer 3 was off by a tenth at 3e-6, and Q took two inputs at 1e-6 for one."""
    x, widths = two_inputs(distance, side), [2, 8, 12, 6, 5]
    rates = RATES | {"C_b": C_b}
    flow = FiniteWidthMLP(widths, Kinked(*slopes), **rates).flow(x)
    with mpmath.workdps(90):
        want = plane_flow(x, *slopes, widths, **rates)
    for layer in (2, 3, 4):
        assert_layers_equal(flow[layer], want[layer - 1], 1e-12)


@pytest.mark.parametrize("distance", [0.3, 1e-7])
def test_four_close_inputs_of_a_plane_against_many_digits(distance):
    """Layer 2, where four different samples meet in one expectation, of rank 2."""
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    x = x + distance * torch.tensor([[0.0, 0.0], [0.3, 1.0], [-0.8, 0.4], [0.2, -0.7]], dtype=torch.float64)
    rates = RATES | {"C_b": 0.0}
    with mpmath.workdps(50):
        want = plane_flow(x, 1.0, 0.3, [2, 8, 5], **rates)[1]
    assert_layers_equal(FiniteWidthMLP([2, 8, 5], Kinked(1.0, 0.3), **rates).flow(x)[2], want, 1e-11, zero=1e-14)


def test_four_close_inputs_are_almost_one():
    """All but P and Q are continuous where inputs meet; of four inputs no second method reaches layer 4."""
    single = torch.tensor([[1.0, 0.5, -0.3]], dtype=torch.float64)
    apart = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mlp = FiniteWidthMLP([3, 8, 12, 6], "relu", **RATES)
    limit, near = (mlp.flow(single + distance * apart)[3] for distance in (0.0, 1e-9))
    for name in ("K", "Theta", "V", "D", "F", "A", "B"):
        torch.testing.assert_close(getattr(near, name), getattr(limit, name), rtol=3e-8, atol=0)
    assert 0 < float(near.P.abs().max()) < 1e-7
    assert float((near.Q / limit.Q - 1).abs().max()) < 0.1


def test_the_reported_case():
    x = torch.full((2, 784), 0.5, dtype=torch.float64)
    x[1, 100] += 1e-4
    A = FiniteWidthMLP([784] + [8] * 6, "relu", C_W=2.0).flow(x)[6].A
    assert A[0, 1, 0, 1].item() == pytest.approx(A[0, 0, 0, 0].item(), rel=1e-4)


def test_angles_that_shrink_with_depth():
    """C_W = C_b = 1 halves the squared distance in each layer: after 60, no double tells the inputs apart."""
    flow = FiniteWidthMLP(8, "relu", C_b=1.0, C_W=1.0, depth=60).flow(
        torch.tensor([[1.0, 0.5], [0.2, -1.0]], dtype=torch.float64)
    )
    gap = [(flow[layer].A[0, 1, 0, 1] / flow[layer].A[0, 0, 0, 0] - 1).item() for layer in (30, 60)]
    assert abs(gap[0]) < 1e-3
    assert abs(gap[1]) < 1e-7
    assert 0 < flow[60].P[0, 1, 1, 1].item() < 1e-6  # one line would have 0


def test_where_inputs_are_one_line():
    """Rounding of the inputs' dtype, and not more: beyond it they are two inputs."""
    mlp = FiniteWidthMLP([2, 8, 8, 8], "relu", **RATES)
    one, same, two = (mlp.flow(two_inputs(distance))[3].Q[0, 1, 0, 1].item() for distance in (0.0, 1e-16, 1e-15))
    assert same == pytest.approx(one, rel=1e-12)
    assert abs(two / one - 1) > 5e-3
    assert two == pytest.approx(mlp.flow(two_inputs(1e-7))[3].Q[0, 1, 0, 1].item(), rel=1e-5)
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    scaled = torch.cat([x, 0.3 * x])  # equal directions, but for the rounding of float32
    layer = FiniteWidthMLP([50, 8, 8, 8], "relu", C_W=2.0).flow(scaled)[3]
    assert float(layer.P.abs().max()) == 0


def test_one_line_stays_one_line_in_deep_networks():
    x = torch.tensor([[1.0, 0.7]], dtype=torch.float64)
    layer = FiniteWidthMLP(8, "relu", C_W=2.0, lambda_b=0.0, depth=40).flow(torch.cat([x, 0.3 * x]))[40]
    assert float(layer.P.abs().max()) == 0
    # 0.3 x is 0.3 x to the last digits, and everything is homogeneous in x.
    assert layer.Q[0, 1, 0, 1].item() == pytest.approx(0.09 * layer.Q[0, 0, 0, 0].item(), rel=1e-12)


@pytest.mark.parametrize(("distance", "tolerance"), [(1e-3, 1e-9), (1e-6, 1e-3)])
def test_a_gram_matrix_holds_its_own_angles(distance, tolerance):
    """Its rounding is an error of the angle, not more: three inputs of rank two must not make noise of it."""
    apart = torch.tensor([[0.0, 0.0], [0.3, 1.0], [0.2, -0.7]], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64) + distance * apart
    mlp = FiniteWidthMLP([2, 8, 8, 8], "relu", **RATES | {"C_b": 0.0})
    exact, found = mlp.flow(x)[3], mlp.flow_from_gram(x @ x.T / 2)[3]
    for name in TENSORS:
        one, other = getattr(exact, name), getattr(found, name)
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance * float(one.abs().max()))


def test_moments_of_a_narrow_kernel():
    """A rounded kernel with 1 - ρ² = 2e-10; the sine that enters <s''s''> keeps the digits that the kernel has."""
    K = torch.tensor([[1.0, 1 - 1e-10], [1 - 1e-10, 1.0]], dtype=torch.float64)
    found = gaussian_moments("relu", K)
    assert found.p22[0, 1].item() == pytest.approx(1 / (2 * np.pi * np.sqrt(2e-10)), rel=1e-6)
    V = found.q0000
    fourth = V[0, 0, 0, 0] - 4 * V[0, 0, 0, 1] + 6 * V[0, 0, 1, 1] - 4 * V[0, 1, 1, 1] + V[1, 1, 1, 1]
    assert abs(fourth.item()) < 5e-15  # <(s_a - s_b)⁴>, of order 1e-20: nothing but the last rounding is left


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_four_signs_in_decimals_against_plackett(rank):
    x = torch.randn(4, rank, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x = torch.nn.functional.normalize(x)
    x[1] = torch.nn.functional.normalize(-x[0] + 0.1 * x[1], dim=0)
    numbers = Decimals(1e-2)
    with numbers.context():
        exact = [[Decimal(v) for v in row] for row in x.tolist()]
        gram = [[sum(a * b for a, b in zip(p, q, strict=True)) for q in exact] for p in exact]
        rows = [[gram[i][j] / (gram[i][i] * gram[j][j]).sqrt() for j in range(4)] for i in range(4)]
        found = four_signs(rows, numbers)
    assert float(found) == pytest.approx(four_signs_of_tables(x @ x.T).item(), abs=1e-13)


def test_four_signs_in_decimals_where_they_are_known():
    """Equal correlation 1/2: E = 1/5, to all digits that are asked for."""
    numbers = Decimals(1e-6)
    with numbers.context():
        rows = [[Decimal(1) if i == j else Decimal("0.5") for j in range(4)] for i in range(4)]
        assert abs(four_signs(rows, numbers) - Decimal("0.2")) < Decimal(10) ** -numbers.target
