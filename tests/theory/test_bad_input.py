"""What cannot be computed is refused with a reason."""

import pytest
import torch
from torch import nn

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.theory.finite_width import FiniteWidthMLP

X = torch.tensor([[1.0, -0.5]])


@pytest.mark.parametrize("C_W", [0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0]])
def test_C_W_must_be_positive(C_W):
    with pytest.raises(InputError, match="C_W must be finite and > 0"):
        FiniteWidthMLP(widths=[2, 4, 1], C_W=C_W)


@pytest.mark.parametrize("name", ["C_b", "lambda_b", "lambda_W"])
def test_other_rates_must_not_be_negative(name):
    with pytest.raises(InputError, match=f"{name} must be finite and >= 0"):
        FiniteWidthMLP(widths=[2, 4, 1], **{name: -0.1})


def test_one_rate_or_one_for_each_layer():
    with pytest.raises(InputError, match="one for each of the 2 layers"):
        FiniteWidthMLP(widths=[2, 4, 1], C_W=[1.0, 1.0, 1.0]).flow(X)


@pytest.mark.parametrize("widths", [[2, 0, 1], [2, -3, 1], [2, True, 1], []])
def test_widths_must_be_positive_integers(widths):
    with pytest.raises(InputError, match="widths"):
        FiniteWidthMLP(widths=widths)


def test_depth_and_widths_must_agree():
    with pytest.raises(InputError, match="depth"):
        FiniteWidthMLP(widths=5)
    with pytest.raises(InputError, match="depth must be"):
        FiniteWidthMLP(widths=5, depth=0)
    with pytest.raises(InputError, match="n_1"):
        FiniteWidthMLP(widths=[5, 5, 5, 5], depth=2)
    with pytest.raises(InputError, match="n_0 = 7"):
        FiniteWidthMLP(widths=[7, 4, 1], depth=2).flow(X)
    with pytest.raises(InputError, match="at least one layer"):
        FiniteWidthMLP(widths=[2]).flow(X)


def test_kernels_must_be_positive_semi_definite():
    mlp = FiniteWidthMLP(widths=4, depth=2)
    with pytest.raises(InputError, match="gram must be positive semi-definite"):
        mlp.flow_from_gram(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (torch.sign, "s"),
        (torch.nn.functional.hardtanh, "s''"),
        (torch.nn.functional.elu, "s'''"),
        (torch.abs, "s''"),
        (lambda z: z.detach() ** 3, "s'"),
        (lambda z: torch.sqrt(z), "finite"),
        (nn.ReLU6(), "s''"),
    ],
)
def test_activations_without_three_derivatives(function, what):
    with pytest.raises(UnsupportedError, match=what):
        FiniteWidthMLP(widths=[2, 4, 1], activation=function)


def test_activations_that_are_none():
    with pytest.raises(InputError, match="activation must be one of"):
        FiniteWidthMLP(widths=[2, 4, 1], activation="tahn")
    with pytest.raises(InputError, match="same shape"):
        FiniteWidthMLP(widths=[2, 4, 1], activation=lambda z: z.sum())


@pytest.mark.parametrize("function", [torch.relu, nn.functional.relu, nn.ReLU(), "ReLU"])
def test_relu_is_recognised_however_it_is_written(function):
    """Autograd would say s'' = 0 and be silently wrong."""
    mlp = FiniteWidthMLP(widths=[2, 4, 4, 1], activation=function, C_W=2.0)
    assert mlp.flow(X)[3].Q.item() > 0
    assert mlp.activation.name == "relu"


def test_a_function_is_what_it_computes_and_not_its_name():
    """Closed forms belong to the named sin and erf, not to a function that happens to be called so."""

    def sin(z):
        return torch.tanh(z)

    mlp = FiniteWidthMLP(widths=[2, 4, 4, 1], activation=sin)
    want = FiniteWidthMLP(widths=[2, 4, 4, 1], activation="tanh").flow(X)
    torch.testing.assert_close(mlp.flow(X)[3].Q, want[3].Q)


def test_a_loose_tolerance_does_not_make_a_kernel_indefinite():
    x = torch.tensor([[1.0, -0.5], [1.0, -0.5 + 1e-6], [1.0, -0.5 - 1e-6]], dtype=torch.float64)
    flow = FiniteWidthMLP(widths=[2, 4, 4, 4, 1], activation="silu").flow(x, tolerance=1e-3)
    assert torch.isfinite(flow[4].Q).all()


def test_inputs():
    mlp = FiniteWidthMLP(widths=[2, 4, 1])
    with pytest.raises(InputError, match="finite"):
        mlp.flow(torch.tensor([[float("nan"), 1.0]]))
    with pytest.raises(InputError, match="at least one input"):
        mlp.flow(torch.zeros(0, 2))
    with pytest.raises(UnsupportedError, match="real"):
        mlp.flow_from_gram(torch.ones(1, 1, dtype=torch.complex128))
    with pytest.raises(InputError, match="kink"):
        mlp.flow(X, kink="smooth")
