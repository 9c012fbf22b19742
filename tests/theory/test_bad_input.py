"""What cannot be computed is refused with a reason."""

import numpy as np
import pytest
import torch
from torch import nn

from fresh import run_after_torch
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.theory.cutoff import depth_to_width
from gramscope.theory.finite_width import FiniteWidthMLP
from gramscope.theory.nearly_kernel import NearlyKernelRegressor
from gramscope.theory.quadratic import QuadraticModel

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
    flow = FiniteWidthMLP(widths=[2, 4, 4, 4, 1], activation="silu").flow(x, tol=1e-3)
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


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.softmax(z, -1),
        lambda z: z - z.mean(),
        lambda z: torch.cumsum(z, 0),
        lambda z: torch.tanh(z + 1e-3 * torch.rand_like(z)),
        lambda z: z / z.norm(),
    ],
)
def test_activations_that_are_not_elementwise(function):
    with pytest.raises(InputError, match="each element alone"):
        FiniteWidthMLP(widths=[2, 4, 1], activation=function)


def test_depth_to_width_of_what_is_not_fully_connected():
    linear = [nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)]
    with pytest.raises(InputError, match="weights in Conv2d"):
        depth_to_width(nn.Sequential(nn.Conv2d(1, 8, 3), *linear))
    plain = depth_to_width(nn.Sequential(*linear))
    normed = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.LayerNorm(16), nn.PReLU(), nn.Linear(16, 2))
    assert depth_to_width(normed) == plain
    torch.nn.utils.parametrizations.weight_norm(normed[1])
    assert depth_to_width(normed) == plain


@pytest.mark.parametrize(
    "samples", [torch.tensor([2]), [-3], torch.tensor([0.0]), torch.tensor([True]), torch.tensor(0)]
)
def test_samples_of_the_drift(samples):
    flow = FiniteWidthMLP(widths=[2, 4, 1], activation="sin").flow(torch.tensor([[1.0, -0.5], [0.3, 0.8]]))
    with pytest.raises(InputError, match="indices of the 2 inputs"):
        flow.ntk_drift(samples)
    assert torch.equal(flow.ntk_drift([1]), flow.ntk_drift(torch.tensor([False, True])))


def test_quadratic_models():
    def features(x):
        return x

    def meta(x):
        return x[:, :, None] * x[:, None, :]

    x, y = np.eye(2, 3), np.ones((2, 1))
    with pytest.raises(InputError, match="epsilon must be one finite number"):
        QuadraticModel(features, meta, float("nan"))
    model = QuadraticModel(features, meta, 0.1)
    for call in (model, model.effective_features):
        with pytest.raises(InputError, match=r"weights must have shape \(outputs, 3\)"):
            call(x, np.ones((1, 2)))
    with pytest.raises(InputError, match=r"features\(x\) must be finite"):
        model.train(np.full((2, 3), np.nan), y)
    with pytest.raises(InputError, match="y must be finite"):
        model.train(x, y * np.nan)


@pytest.mark.parametrize("output", [5, -1, True])
def test_outputs_of_a_trained_kernel(output):
    x = np.linspace(-1, 1, 4)[:, None]
    fitted = NearlyKernelRegressor().fit(x, x[:, 0])
    for kernel in (fitted.trained_kernel, fitted.effective_kernel):
        with pytest.raises(InputError, match="output must be an integer of 0"):
            kernel(x, output=output)


WRONG_TYPES = """
import numpy as np, torch
from gramscope.base.errors import InputError
from gramscope.theory import FiniteWidthMLP, QuadraticModel, ensemble, strengths
mlp = FiniteWidthMLP([2, 4, 1])
flow = mlp.flow(torch.ones(1, 2))
for call, part in [
    (lambda: FiniteWidthMLP([2, 4, 1], C_W="1"), "C_W must be a number"),
    (lambda: FiniteWidthMLP([2, 4, 1], C_W=["1", "1"]), "C_W must be a number"),
    (lambda: mlp.flow(np.ones((1, 2))), "x must be a torch.Tensor, got ndarray"),
    (lambda: mlp.flow(torch.ones(1, 2, 1)), "Flatten the features"),
    (lambda: flow.ntk_drift([0.5]), "indices of the 1 inputs"),
    (lambda: flow.ntk_drift(0), "a list or a tensor of indices"),
    (lambda: ensemble(flow, width=4.5), "width must be a whole number"),
    (lambda: ensemble(mlp), "theory must be a Flow"),
    (lambda: strengths(mlp), "flow must be a Flow"),
    (lambda: QuadraticModel(len, len, "a"), "epsilon must be one finite number"),
]:
    try:
        call()
    except InputError as error:
        assert part in str(error), (part, str(error))
    else:
        raise AssertionError(part)
"""


def test_wrong_types_without_the_type_checks_of_the_tests():
    run_after_torch(WRONG_TYPES)
