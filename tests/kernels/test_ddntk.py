"""The two ddNTKs: against their definitions, against real steps, against training to the end."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.kernels import (
    DDNTK,
    dntk,
    dntk_velocity,
    ntk_acceleration,
    output_curvature,
    output_third_order,
    train_truncated,
)
from gramscope.kernels.derivatives import derivative, step_direction
from gramscope.kernels.expansion import Expansion
from gramscope.theory import CubicKernels
from references.ddntk import ddntks_by_definition


class Tied(nn.Module):
    """One weight used twice, a bias used in a product."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2))

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.bias) @ self.weight.T * self.bias


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.attend(x, x, x, need_weights=False)[0]).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(1, 2, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0][:, -1]


def mlp(widths=(2, 3, 1)):
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def grouped():
    return nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.GELU(), nn.Flatten(), nn.Linear(8, 1))


STRANGE = {
    "mlp": (mlp, (2, 2)),
    "tied weight": (Tied, (2, 2)),
    "grouped convolution": (grouped, (1, 2, 3)),
}


def made(build, shape, seed=0):
    torch.manual_seed(seed)
    return build().double(), torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", STRANGE)
def test_dense_against_the_definition(name):
    model, x = made(*STRANGE[name])
    size = sum(p.numel() for p in model.parameters())
    rates = torch.rand(size, dtype=torch.float64) + 0.5
    first, second = ddntks_by_definition(model, x, rates)
    found = DDNTK(model, x, metric=rates)
    dense = found.dense()
    for ours, want in ((dense.first, first), (dense.second, second)):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-12 * max(1.0, float(want.abs().max())))
    assert float(first.abs().max()) > 1e-3
    a, b, c = (torch.randn(found.expansion.rows.shape, dtype=torch.float64) for _ in range(3))
    flat = [v.flatten() for v in (a, b, c)]
    want = torch.einsum("ijkl,j,k,l->i", first, *flat).reshape(a.shape)
    torch.testing.assert_close(found.first(a, b, c), want, rtol=0, atol=1e-11 * float(want.abs().max()))
    product = found.second(a, b)
    want = torch.einsum("ijkl,k,l->ij", second, *flat[:2])
    torch.testing.assert_close(product.dense(), want, rtol=0, atol=1e-11 * float(want.abs().max()))
    torch.testing.assert_close(product.T @ flat[2], want.T @ flat[2], rtol=0, atol=1e-10 * float(want.abs().max()))


@pytest.mark.parametrize("build", [lambda: mlp((2, 5, 4, 2)), Attention, Recurrent], ids=["mlp", "attention", "lstm"])
def test_a_real_step_errs_with_the_next_power(build):
    """Outputs to O(lr⁴), the kernel to O(lr³); without the ddNTKs one power less."""
    shape = {"Attention": (2, 3, 4), "Recurrent": (3, 3, 1)}.get(getattr(build, "__name__", ""), (3, 2))
    model, x = made(build, shape, seed=1)
    f = model(x).detach()
    y = f + torch.randn_like(f)
    residual = f - y
    gradients = torch.autograd.grad(0.5 * (model(x) - y).square().sum(), list(model.parameters()))
    K, size = gs.ntk(model, x).reshape(f.numel(), -1), f.numel()
    slope = -(K @ residual.flatten()).reshape(f.shape)
    curvature, third = output_curvature(model, x, residual), output_third_order(model, x, residual)
    velocity = dntk_velocity(model, x, residual).reshape(size, size)
    acceleration = ntk_acceleration(model, x, residual).dense()
    errors = {"outputs": [], "kernel": [], "outputs without": [], "kernel without": []}
    for lr in (0.002, 0.001):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, g in zip(moved.parameters(), gradients, strict=True):
                p.sub_(lr * g)
        gap = moved(x).detach() - f - lr * slope - lr**2 * curvature
        drift = gs.ntk(moved, x).reshape(size, size) - K - lr * velocity
        errors["outputs"].append(gap - lr**3 * third)
        errors["outputs without"].append(gap)
        errors["kernel"].append(drift - lr**2 / 2 * acceleration)
        errors["kernel without"].append(drift)
    powers = {name: math.log2(float(a.norm() / b.norm())) for name, (a, b) in errors.items()}
    assert powers["outputs"] == pytest.approx(4, abs=0.25)
    assert powers["kernel"] == pytest.approx(3, abs=0.25)
    assert powers["outputs without"] == pytest.approx(3, abs=0.25)
    assert powers["kernel without"] == pytest.approx(2, abs=0.25)


class Lazy(nn.Module):
    """``α (f(θ) - f(θ₀))``: with the learning rate over α² the way of the parameters is of order 1/α."""

    def __init__(self, net, alpha):
        super().__init__()
        self.net, self.alpha, self.start = net, alpha, [copy.deepcopy(net)]

    def forward(self, x):
        return self.alpha * (self.net(x) - self.start[0](x).detach())


def trained(model, x, y, lr, rate, steps=2000):
    """Real gradient descent, to the end if the steps allow."""
    model = copy.deepcopy(model)
    for _ in range(steps):
        residual = model(x) - y
        if float(residual.detach().abs().max()) < 1e-12:
            break
        gradients = torch.autograd.grad(0.5 * residual.square().sum(), list(model.net.parameters()))
        with torch.no_grad():
            for p, g in zip(model.net.parameters(), gradients, strict=True):
                p.sub_(lr * rate * g)
    return model


def test_a_trained_network_is_predicted_to_third_order():
    """The kernel errs with 1/α, the meta kernel with 1/α², the ddNTKs with 1/α³; so do truncated networks."""
    net, x = made(lambda: mlp((2, 4, 1)), (4, 2), seed=7)
    y, lr, seen = torch.tensor([[0.7], [-0.4]], dtype=torch.float64), 0.3, 2
    errors, truncated = [], []
    for alpha in (16.0, 32.0):
        model, rate = Lazy(net, alpha), alpha**-2
        real = trained(model, x[:seen], y, lr, rate)(x).detach().flatten().numpy()
        K, dH = gs.ntk(model, x).reshape(4, 4) * rate, dntk(model, x, metric=rate).reshape(4, 4, 4)
        dense = DDNTK(model, x, metric=rate).dense()
        tensors = [model(x).detach(), K, dH, *dense]
        row = []
        for last in (2, 3, 5):
            some = [tensor if place < last else 0 * tensor for place, tensor in enumerate(tensors)]
            row.append(np.linalg.norm(CubicKernels(*some).train(y.numpy(), lr).outputs - real))
        errors.append(row)
        early = trained(model, x[:seen], y, lr, rate, steps=4)(x).detach()
        found = [
            train_truncated(model, x[:seen], y, lr=lr, order=order, probe=x, metric=rate, steps=4)
            for order in (1, 2, 3)
        ]
        assert all(one.steps == 4 and not one.converged for one in found)
        truncated.append([float((one.predicted - early).norm()) for one in found])
    np.testing.assert_allclose(np.log2(np.divide(*errors)), [1, 2, 3], atol=0.15)
    np.testing.assert_allclose(np.log2(np.divide(*truncated)), [1, 2, 3], atol=0.15)


def test_the_dntk_moves_by_both():
    """dH after a step: -η (ddI_012j + ddII_012j + ddII_021j) ε_j, against the dNTK of the moved network."""
    model, x = made(lambda: mlp((2, 3, 1)), (3, 2), seed=3)
    residual = torch.randn(3, 1, dtype=torch.float64)
    gradients = torch.autograd.grad((model(x) * residual).sum(), list(model.parameters()))
    dH = dntk(model, x).reshape(3, 3, 3)
    kernels = CubicKernels(model(x), gs.ntk(model, x).reshape(3, 3), dH, *DDNTK(model, x).dense())
    gaps = []
    for lr in (0.02, 0.01):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, g in zip(moved.parameters(), gradients, strict=True):
                p.sub_(lr * g)
        after = kernels.step(residual.flatten().numpy(), lr).meta
        gaps.append(np.linalg.norm(after - dntk(moved, x).reshape(3, 3, 3).numpy()))
    assert math.log2(gaps[0] / gaps[1]) == pytest.approx(2, abs=0.2)


def test_bad_input():
    model, x = made(mlp, (3, 2))
    found = DDNTK(model, x)
    with pytest.raises(InputError, match=r"ddNTKs.*contracted forms.*DDNTK.first.*train_truncated"):
        found.dense(memory=1000)
    with pytest.raises(InputError, match=r"b must have the shape \(3, 1\)"):
        found.first(torch.ones(3, 1), torch.ones(2, 1), torch.ones(3, 1))
    with pytest.raises(InputError, match="order must be 1"):
        train_truncated(model, x, torch.ones(3, 1), lr=0.1, order=4)
    with pytest.raises(InputError, match=r"y must have the shape \(3, 1\)"):
        train_truncated(model, x, torch.ones(3), lr=0.1)
    resting = train_truncated(model, x, torch.ones(3, 1), lr=0.0, steps=2)  # a step of no length
    assert not resting.change.any()
    assert not resting.converged
    with pytest.raises(InputError, match="ran away after 1 steps with lr=50"):
        train_truncated(model, x, 10 * torch.ones(3, 1), lr=50.0, order=2)
    with pytest.raises(InputError, match=r"meta must have shape \(1, 1, 1\)"):
        CubicKernels(np.zeros(1), np.ones((1, 1)), np.ones((1, 1)), np.ones((1,) * 4), np.ones((1,) * 4))
    plain = CubicKernels(np.zeros(1), np.ones((1, 1)), *(np.zeros((1,) * k) for k in (3, 4, 4)))
    with pytest.raises(InputError, match="ran away with lr=3"):
        plain.train(np.ones(1), lr=3.0)
    with pytest.raises(InputError, match="y must hold 1 to 1 targets"):
        plain.train(np.ones(2), lr=0.5)


class WrongThird(torch.autograd.Function):
    """x³ with a second derivative that counts a factor as constant: right once, wrong from then on."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**3

    @staticmethod
    def backward(ctx, c):
        (z,) = ctx.saved_tensors
        return 3 * c * z * z.detach()


def test_a_wrong_derivative_is_refused():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.3, 0.4], dtype=torch.float64))

        def forward(self, x):
            return WrongThird.apply(x * self.w)

    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="derivative"):
        output_third_order(Wrong(), x, torch.ones(1, 2, dtype=torch.float64))


# Of the 301 networks of the zoo: two that are so stiff that a difference sees too little, one that hides a path from
# autograd on purpose, and two that round to float32 inside.
APART = {
    "group_norm_without_positions",
    "complex_network_with_a_real_output",
    "stop_gradient_in_one_path",
    "hf_llama",
    "hf_t5_encoder",
}
# Their backward passes cannot be differentiated again, or not rightly.
REFUSED = {
    "detached_tanh",
    "once_differentiable_tanh",
    "numpy_tanh",
    "detached_linear",
    "detached_linear_of_little_weight",
    "adjoint_solver",
    "recomputed_in_the_backward_pass",
    "equilibrium_by_hook",
    "spectral_norm_train",
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CASES if name not in APART])
def test_third_derivatives_over_the_zoo(name):
    """Along the step of a residual, against central differences of second derivatives, kinks kept on their sides."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build()
    at = Expansion(model, x, outputs=case.outputs)
    residual = 0.1 * torch.cos(torch.arange(at.rows.size, dtype=torch.float64)).reshape(at.rows.shape)
    direction = step_direction(at, residual)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match="derivative"):
            derivative(at.tangent(direction).tangent(direction), direction)
        return
    found = derivative(at.tangent(direction).tangent(direction), direction).flatten()
    h = 1e-4 / max(1.0, float(direction.norm()))
    ahead, behind = (at.at(sign * h * direction, keep_sides=True).tangent(direction) @ direction for sign in (1, -1))
    want = (ahead - behind) / (2 * h)
    assert float((found - want).norm()) <= 1e-4 * max(float(want.norm()), 1e-3 * float(ahead.norm()), 1e-9)


def test_what_holds_kernels_says_of_which_network():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    found = DDNTK(model, torch.randn(4, 2).double())
    assert repr(found) == "DDNTK(Axes(example=4, output=1), 13 parameters)"
    assert repr(found.dense()) == "DenseDDNTK(first and second, 4 outputs on each of their four axes)"
    assert repr(gs.kernels.TangentKernels(model)) == "TangentKernels of Sequential (float64)"
