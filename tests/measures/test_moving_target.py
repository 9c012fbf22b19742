"""Linearised training against parameter-space gradient descent, and paths through a decoder against regressions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from gramscope.base.errors import InputError
from gramscope.base.user_warnings import UndefinedMeasureWarning
from gramscope.measures import interpolate, interpolation_linearity, moving_target, path_linearity
from references.linearity_training import linearised_outputs
from references.linearity_training import path_linearity as regression


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def as_function(model):
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def function(theta, x):
        parts, at = {}, 0
        for name, shape in shapes.items():
            parts[name] = theta[at : at + shape.numel()].reshape(shape)
            at += shape.numel()
        return torch.func.functional_call(model, parts, (x,))

    return function, torch.cat([p.detach().flatten() for p in model.parameters()])


X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
TEST = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0])


def test_linearised_runs_are_gradient_descent_on_the_linearised_network():
    model = network(0)
    found = moving_target(
        model, X, LABELS, cross_entropy, lr=0.3, steps=12, starts=[0, 5], test=(TEST, torch.tensor([0, 1, 1, 0]))
    )
    twin = network(0)
    every = torch.cat([X, TEST])
    for step in range(12):
        if step in (0, 5):
            function, theta = as_function(twin)

            def residual(f):
                return (f.softmax(1) - torch.nn.functional.one_hot(LABELS)) / len(f)

            expected = linearised_outputs(function, theta, X, every, residual, 0.3, 12 - step)
            # Sums over some hundred steps and parameters in another order.
            torch.testing.assert_close(found.runs[step].outputs, expected.detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(found.before[step], twin(every).detach(), rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(cross_entropy(twin(X), LABELS), list(twin.parameters()))
        with torch.no_grad():
            for p, g in zip(twin.parameters(), gradients, strict=True):
                p -= 0.3 * g
    torch.testing.assert_close(found.outputs, twin(every).detach(), rtol=0, atol=1e-12)
    assert found.train_loss.shape == found.test_loss.shape == (13,)
    assert found.runs[5].train_loss.shape == found.runs[5].test_loss.shape == (8,)
    assert float(found.runs[5].train_loss[0]) == pytest.approx(float(found.train_loss[5]), rel=1e-12)
    apart = found.runs[0].outputs - found.outputs
    assert found.gap(0) == pytest.approx(float(apart.norm() / (found.outputs - found.before[0]).norm()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), network(0).parameters(), strict=True))


def test_a_linear_network_is_its_own_linearisation():
    found = moving_target(nn.Linear(3, 1).double(), X, X[:, :1], mse_loss, lr=0.1, steps=10, starts=[0, 4])
    assert found.gap(0) < 1e-10
    assert found.gap(4) < 1e-10
    assert found.test_loss is None


def test_bad_input_of_runs():
    for options, words in (
        ({"lr": -0.1, "steps": 3}, "lr must be"),
        ({"lr": 0.1, "steps": 0}, "steps must be"),
        ({"lr": 0.1, "steps": 3, "starts": [3]}, "from 0 to 2"),
        ({"lr": 0.1, "steps": 3, "starts": []}, "from 0 to 2"),
    ):
        with pytest.raises(InputError, match=words):
            moving_target(network(0), X, LABELS, cross_entropy, **options)
    with pytest.raises(InputError, match="outputs of shape"):
        moving_target(nn.Flatten(0), X, LABELS, mse_loss, lr=0.1, steps=2)
    with pytest.raises(InputError, match="x and y must have one row"):
        moving_target(network(0), X, LABELS[:3], cross_entropy, lr=0.1, steps=2)
    with pytest.raises(InputError, match="the test inputs and their targets"):
        moving_target(network(0), X, LABELS, cross_entropy, lr=0.1, steps=2, test=(X, LABELS[:3]))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(3, 9), width=st.integers(1, 4))
def test_path_linearity_is_the_r_squared_of_a_regression_on_t(seed, steps, width):
    paths = np.random.default_rng(seed).standard_normal((3, steps, width))
    found = path_linearity(torch.as_tensor(paths))
    assert found.tolist() == pytest.approx([regression(path) for path in paths], rel=1e-10, abs=1e-12)


def test_paths_through_a_decoder():
    rng = torch.Generator().manual_seed(0)
    start, stop = (torch.randn(5, 2, generator=rng).double() for _ in range(2))
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    found = interpolation_linearity(decoder, start, stop, steps=7, layers=["0", "1"])
    assert list(found.linearity) == ["(input)", "0", "1", "(output)"]
    t = torch.linspace(0, 1, 7, dtype=torch.float64)[:, None]
    for pair in range(5):
        hidden = torch.tanh(decoder[0]((1 - t) * start[pair] + t * stop[pair])).detach()
        assert float(found.linearity["1"][pair]) == pytest.approx(regression(hidden.numpy()), rel=1e-10)
        torch.testing.assert_close(found.outputs[pair], decoder[2](hidden).detach())
    assert found.linearity["0"].tolist() == pytest.approx([1.0] * 5, abs=1e-12)
    assert found.mean()["1"] < 1 - 1e-4


def test_spherical_paths_keep_their_radius_and_their_angle():
    start, stop = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [2.0, 2.0]])
    paths = interpolate(start.double(), stop.double(), 5, kind="spherical")
    angles = torch.arange(5).double() * math.pi / 8
    torch.testing.assert_close(paths[0], 2 * torch.stack([angles.cos(), angles.sin()], 1))
    torch.testing.assert_close(paths[1], interpolate(start.double(), stop.double(), 5)[1])  # one direction: a line
    torch.testing.assert_close(paths[:, 0], start.double())


def test_bad_input_of_paths():
    with pytest.raises(InputError, match="one shape"):
        interpolate(torch.ones(2, 3), torch.ones(3, 3))
    with pytest.raises(InputError, match="steps must be"):
        interpolate(torch.ones(2, 3), torch.ones(2, 3), 1)
    with pytest.raises(InputError, match="kind must be"):
        interpolate(torch.ones(2, 3), torch.ones(2, 3), kind="geodesic")
    with pytest.raises(InputError, match="opposite"):
        interpolate(torch.ones(1, 3), -torch.ones(1, 3), kind="spherical")
    with pytest.raises(InputError, match="away from zero"):
        interpolate(torch.zeros(1, 3), torch.ones(1, 3), kind="spherical")
    with pytest.raises(InputError, match="3 steps at least"):
        path_linearity(torch.ones(2, 2, 3))
    with pytest.raises(InputError, match="paths must be finite, but 1 of 18"):
        path_linearity(torch.arange(18.0).reshape(2, 3, 3).log())
    with pytest.warns(UndefinedMeasureWarning, match="1 of 2 paths"):
        found = path_linearity(torch.stack([torch.zeros(4, 1), torch.arange(4.0)[:, None]]))
    assert found.isnan().tolist() == [True, False]
