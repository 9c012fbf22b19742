"""Critical points, closed solutions, learning rates and the depth-to-width cutoff."""

import math

import numpy as np
import pytest
import torch

import gramscope as gs
from cases import all_in_full
from gramscope.base.errors import InputError
from gramscope.theory.activation_functions import Kinked
from gramscope.theory.finite_width import FiniteWidthMLP

ONE = torch.tensor([[1.0, -0.5]], dtype=torch.float64)


def critical_flow(activation, depth, lambda_b, lambda_W, K=None):
    point = gs.theory.critical_point(activation)
    biases, weights = gs.theory.equivalent_learning_rates(activation, depth, lambda_b, lambda_W)
    mlp = FiniteWidthMLP(10, activation, point.C_b, point.C_W, biases, weights, depth=depth)
    gram = torch.tensor([[1.0 if K is None else K / point.C_W]], dtype=torch.float64)
    return mlp.flow_from_gram(gram)


@pytest.mark.parametrize(
    ("name", "C_b", "C_W", "K_star"),
    [
        ("tanh", 0.0, 1.0, 0.0),
        ("sin", 0.0, 1.0, 0.0),
        ("erf", 0.0, math.pi / 4, 0.0),
        ("relu", 0.0, 2.0, None),
        ("linear", 0.0, 1.0, None),
        ("gelu", 0.17292239, 1.98305826, (3 + math.sqrt(17)) / 2),
        ("silu", 0.55514317, 1.98800468, 14.32017362),
    ],
)
def test_tuned_hyperparameters(name, C_b, C_W, K_star):
    """Values of PDLT (chapter 5; GELU also computed by quadrature)."""
    point = gs.theory.critical_point(name)
    assert (point.C_b, point.C_W) == (pytest.approx(C_b, abs=1e-8), pytest.approx(C_W, abs=1e-8))
    assert point.K_star == (None if K_star is None else pytest.approx(K_star, abs=1e-7))
    at = gs.theory.susceptibilities(name, 1.0 if K_star is None else K_star, C_W)
    assert at.parallel == pytest.approx(1, abs=1e-7)
    assert at.perpendicular == pytest.approx(1, abs=1e-7)


def test_a_callable_is_tuned_as_the_function_it_is():
    point = gs.theory.critical_point(lambda z: 3 * torch.tanh(z / 2))
    assert (point.universality, point.C_W) == ("K*=0", pytest.approx(4 / 9))
    assert gs.theory.critical_point(lambda z: -2 * z).universality == "scale-invariant"
    with pytest.raises(InputError, match="critical point"):
        gs.theory.critical_point(torch.sigmoid)


def test_susceptibilities_are_derivatives():
    """χ_∥ = dK'/dK, h = ½ dχ_⊥/dK, by differences."""
    step = 1e-4

    def kernel_after(K):
        gram = torch.tensor([[K / 1.3]], dtype=torch.float64)
        return FiniteWidthMLP(1, "gelu", 0.0, 1.3, depth=2).flow_from_gram(gram)[2].K.item()

    at = gs.theory.susceptibilities("gelu", 0.8, 1.3)
    assert at.parallel == pytest.approx((kernel_after(0.8 + step) - kernel_after(0.8 - step)) / (2 * step), abs=1e-7)
    above, below = (gs.theory.susceptibilities("gelu", K, 1.3).perpendicular for K in (0.8 + step, 0.8 - step))
    assert at.h == pytest.approx((above - below) / (4 * step), abs=1e-7)


@pytest.mark.parametrize("activation", ["relu", "linear", Kinked(1.0, -0.3), Kinked(0.5, 2.0)])
def test_scale_invariant_closed_form_is_exact(activation):
    """(11.74)-(11.81) at every layer, to 1e-12."""
    depth, K = 7, 1.7
    flow = critical_flow(activation, depth, 0.6, 1.3, K)
    for layer in range(1, depth + 1):
        want = gs.theory.scale_invariant_layer(activation, layer, depth, K, 0.6, 1.3)
        for name, value in vars(want).items():
            assert getattr(flow[layer], name).item() == pytest.approx(value, rel=1e-12, abs=1e-13), (layer, name)


@pytest.mark.parametrize("name", ["sin", "erf"])
def test_vanishing_kernel_asymptotics(name):
    """(11.82)-(11.102) at l = 150: corrections are O(log l / l)."""
    depth = 150
    flow = critical_flow(name, depth, 0.8, 1.0)
    want = gs.theory.vanishing_kernel_layer(name, depth, depth, 0.8, 1.0)
    for tensor in ("K", "Theta", "V", "F", "B", "P", "Q"):
        assert getattr(flow[depth], tensor).item() == pytest.approx(getattr(want, tensor), rel=0.12), tensor


@pytest.mark.parametrize("name", all_in_full(["sin", "erf"], each=2))
def test_vanishing_kernel_asymptotics_in_the_limit(name):
    """The ratio to the recursion, c₀ + (c₁ log l + c₂)/l through three layers: c₀ is 1 to 0.4 %."""
    layers, depth = np.array([100, 200, 400]), 400
    flow = critical_flow(name, depth, 0.8, 1.0)
    forms = [gs.theory.vanishing_kernel_layer(name, int(layer), depth, 0.8, 1.0) for layer in layers]
    powers = np.stack([np.ones(3), np.log(layers) / layers, 1 / layers], axis=1)
    for tensor in ("K", "Theta", "V", "F", "B", "P", "Q"):
        found = [getattr(flow[int(layer)], tensor).item() for layer in layers]
        ratios = np.array(found) / [getattr(form, tensor) for form in forms]
        assert np.linalg.solve(powers, ratios)[0] == pytest.approx(1, abs=4e-3), tensor


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_half_stable_exponents(name):
    """From the fixed point itself, where nothing moves but Θ, by an equal part in each layer."""
    point = gs.theory.critical_point(name)
    flow = critical_flow(name, 32, 0.8, 1.0, point.K_star - point.C_b)
    assert set(point.exponents) == {"K", "Theta"}
    for tensor, exponent in point.exponents.items():
        far, near = getattr(flow[32], tensor).item(), getattr(flow[16], tensor).item()
        assert -math.log2(far / near) == pytest.approx(exponent, abs=1e-9), tensor


@pytest.mark.parametrize("name", ["erf", "relu"])
def test_critical_exponents(name):
    depth = 128
    flow = critical_flow(name, depth, 0.8, 1.0)
    for tensor, exponent in gs.theory.critical_point(name).exponents.items():
        far, near = getattr(flow[128], tensor).item(), getattr(flow[64], tensor).item()
        assert -math.log2(far / near) == pytest.approx(exponent, abs=0.12), tensor


def test_every_layer_has_an_equal_part_in_the_ntk():
    """The equivalence principle: the NTK grows by about the same amount in each layer, the first few apart."""
    for name in ("relu", "sin"):
        depth = 32
        rates_b, rates_W = gs.theory.equivalent_learning_rates(name, depth)
        point = gs.theory.critical_point(name)
        parts = []
        for layer in (8, 16, 32):
            only = [[r if place + 1 == layer else 0.0 for place, r in enumerate(rates)] for rates in (rates_b, rates_W)]
            mlp = FiniteWidthMLP(4, name, point.C_b, point.C_W, *only, depth=depth)
            parts.append(mlp.flow_from_gram(torch.ones(1, 1))[depth].Theta.item())
        assert max(parts) < 1.3 * min(parts), name


def test_depth_to_width():
    found = gs.theory.depth_to_width(FiniteWidthMLP(widths=[5, 100, 300, 2]))
    assert found.width == pytest.approx(150)
    assert found.ratio == pytest.approx(0.02)
    assert found.regime == "representation learning"
    assert gs.theory.depth_to_width([4, 3, 3, 3, 1]).regime == "strongly coupled"
    from_module = torch.nn.Sequential(torch.nn.Linear(5, 100), torch.nn.Linear(100, 300), torch.nn.Linear(300, 2))
    assert gs.theory.depth_to_width(from_module) == found
    with pytest.raises(InputError, match="chain"):
        gs.theory.depth_to_width(torch.nn.Conv1d(2, 3, 1))
    with pytest.raises(InputError, match="hidden"):
        gs.theory.depth_to_width([4, 1])


def test_strengths_of_several_inputs_are_those_of_the_strongest():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    both = gs.theory.strengths(FiniteWidthMLP(widths=[2, 8, 16, 1], C_W=1.2).flow(x))
    each = [gs.theory.strengths(FiniteWidthMLP(widths=[2, 8, 16, 1], C_W=1.2).flow(x[i : i + 1])) for i in range(2)]
    for name, values in both.items():
        alone = torch.stack([one[name] for one in each])
        assert torch.allclose(values.abs(), alone.abs().amax(0))


def test_pictures():
    flow = FiniteWidthMLP(widths=8, depth=4, activation="relu", C_W=2.0).flow_from_gram(torch.ones(1, 1))
    axes = gs.theory.plot_strengths(flow)
    assert len(axes.lines) == 6
    assert gs.theory.plot_kernel_flow("relu", depth=5).get_ylabel() == "kernel K"


def test_what_is_refused():
    with pytest.raises(InputError, match="K\\* = 0 class"):
        gs.theory.vanishing_kernel_layer("relu", 2, 4)
    with pytest.raises(InputError, match="piecewise linear"):
        gs.theory.scale_invariant_layer("tanh", 2, 4, 1.0)
    with pytest.raises(InputError, match="layer"):
        gs.theory.scale_invariant_layer("relu", 5, 4, 1.0)
    with pytest.raises(InputError, match="depth"):
        gs.theory.equivalent_learning_rates("relu", 0)
    with pytest.raises(InputError, match="C_W"):
        gs.theory.susceptibilities("relu", 1.0, 0.0)
