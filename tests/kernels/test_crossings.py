"""Kink crossings of real steps, and the one-step prediction of the kernel's change."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.kernels.crossings import kink_crossings, ntk_step
from gramscope.kernels.expansion import Expansion
from gramscope.kernels.kernel_velocity import dntk_velocity
from gramscope.kernels.learning_rates import layer_rates
from gramscope.ops.kinks import FixedSides, Sides, Smoothed
from references.fingerprint import assert_same_fingerprint, fingerprint


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, z):
        return self.function(z)


def two_layers(width, seed, C_W=2.0):
    """L = 2, one output, no bias at initialisation: z1 = W1 x, f = W2 relu(z1)."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1)).double()
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=math.sqrt(C_W / layer.in_features))
        nn.init.zeros_(layer.bias)
    return model


def moved(model, x, lr, rates, loss):
    other = copy.deepcopy(model)
    gradients = torch.autograd.grad(loss(other(x)), list(other.parameters()), allow_unused=True)
    with torch.no_grad():
        for (name, p), g in zip(other.named_parameters(), gradients, strict=True):
            if g is not None:
                p.sub_(lr * rates.get(name, 1.0) * g)
    return other


def test_counts_equal_signs_before_and_after():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 30), nn.LeakyReLU(0.1), nn.Linear(30, 2)).double()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    loss = lambda f: 0.5 * (f - y).square().sum()  # noqa: E731
    before = fingerprint(model, x)
    got = kink_crossings(model, x, loss, lr=0.05)
    after = fingerprint(model, x)
    ignored = "python random numbers"  # beartype draws on them under pytest
    assert_same_fingerprint({**before, ignored: 0}, {**after, ignored: 0})
    new = moved(model, x, 0.05, {}, loss)
    assert [site.name for site in got.sites] == ["relu", "leaky_relu"]
    for site, depth in zip(got.sites, (1, 3), strict=True):
        old, now = model[:depth](x) > 0, new[:depth](x) > 0
        assert site.kinks == old.numel()
        assert (site.up, site.down) == (int((now & ~old).sum()), int((old & ~now).sum()))
        assert site.crossed == site.up + site.down > 0
        assert site.expected == pytest.approx(site.crossed, rel=0.5)
    assert "kinks crossed" in str(got)


def test_a_small_step_crosses_as_foreseen():
    model, x = two_layers(400, 0), torch.tensor([[1.0, -0.5]]).double()
    got = kink_crossings(model, x, lambda f: 0.5 * (f - 3).square().sum(), lr=0.3)
    assert got.sites[0].expected == got.sites[0].crossed > 0  # one layer: its displacement is exactly linear


@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_crossing_part_in_closed_form(lr):
    """L = 2: H = λ_b + (λ_W/n) Σ s² + Θ Σ W² s'²; the part by crossings is the difference of new and old masks."""
    width, x, lambda_b = 64, torch.tensor([[1.0, -0.5]]).double(), 0.3
    theta = lambda_b + 0.625
    for seed in range(3):
        model = two_layers(width, seed)
        rates = layer_rates(model, lambda_b=lambda_b, lambda_W=1.0)
        step = ntk_step(model, x, lambda f: 0.5 * f.square().sum(), lr, metric=rates)
        z, W = model[0](x)[0].detach(), model[2].weight[0].detach()
        mask, f = (z > 0).double(), model(x).item()
        z1, W1 = z - lr * f * theta * W * mask, W - lr * f / width * z * mask
        new = (z1 > 0).double()

        def kernel(z, W, mask):
            return lambda_b + ((z * mask) ** 2).sum() / width + theta * (W**2 * mask).sum()

        assert step.kernel.item() == pytest.approx(kernel(z, W, mask).item(), rel=1e-12)
        assert step.measured.item() == pytest.approx((kernel(z1, W1, new) - kernel(z, W, mask)).item(), rel=1e-9)
        crossing = kernel(z1, W1, new) - kernel(z1, W1, mask)
        assert step.crossing.item() == pytest.approx(crossing.item(), rel=1e-9, abs=1e-12)
        predicted = -4 * lr * f / width * theta * (W * z * mask).sum()
        assert step.predicted.item() == pytest.approx(predicted.item(), rel=1e-9)


def test_the_mean_kernel_moves_by_crossings():
    """The figure of the issue at small size: the dNTK misses most of the mean change, the crossing term has it.

    Mean crossing part: -η Θ₁² C_W^{3/2} E|ε| / (π √(K₁ n)), exact to leading order in 1/√n.
    """
    width, count, lr, lambda_b = 128, 150, 0.3, 0.3
    x, theta, K = torch.tensor([[1.0, -0.5]]).double(), 0.925, 1.25
    parts = []
    for seed in range(count):
        model = two_layers(width, 1000 + seed)
        rates = layer_rates(model, lambda_b=lambda_b, lambda_W=1.0)
        z, W = model[0](x)[0].detach(), model[2].weight[0].detach()
        f = model(x).item()
        if seed < 3:  # the rest by the closed form, which the test above holds against ntk_step
            step = ntk_step(model, x, lambda f: 0.5 * f.square().sum(), lr, metric=rates)
            assert step.crossings.sites[0].up == 0  # units that are off have no gradient: only the way down is open
        mask = (z > 0).double()
        z1, W1 = z - lr * f * theta * W * mask, W - lr * f / width * z * mask
        new = (z1 > 0).double()
        change = ((z1 * new) ** 2 - (z * mask) ** 2).sum() / width + theta * (W1**2 * new - W**2 * mask).sum()
        crossing = ((z1**2 * (new - mask)).sum() / width + theta * (W1**2 * (new - mask)).sum()).item()
        formula = -lr * theta**2 * 2**1.5 * abs(f) / (math.pi * math.sqrt(K * width))
        parts.append([change.item(), -4 * lr * f / width * theta * (W * z * mask).sum().item(), crossing, formula])
    measured, dntk, crossing, formula = torch.tensor(parts).T
    error = (crossing - formula).std() / math.sqrt(count)
    assert abs((crossing - formula).mean()) < 3.5 * error
    assert formula.mean() < -5 * error
    assert abs((measured - dntk).mean()) > 0.8 * abs(crossing.mean())
    assert abs((measured - dntk - crossing).mean()) < 0.2 * abs(measured.mean())


def test_prediction_with_crossings_has_slope_two():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    steps = [ntk_step(model, x, lambda f: 0.5 * (f - y).square().sum(), lr) for lr in (4e-3, 2e-3)]
    errors = [(s.measured - s.predicted - s.crossing).norm() for s in steps]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)
    assert all(s.crossings.crossed > 0 for s in steps)
    assert steps[1].error_with_crossings < 0.3 * steps[1].error
    assert "kernel moved by" in str(steps[0])


def test_one_step_of_a_smooth_network():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2)).double()
    x, y, probe = torch.randn(5, 3).double(), torch.randn(5, 2).double(), torch.randn(3, 3).double()
    loss = lambda f: 0.5 * (f - y).square().sum()  # noqa: E731
    lr = 1e-3
    step = ntk_step(model, x, loss, lr, probe=probe)
    new = moved(model, x, lr, {}, loss)
    change = gs.ntk(new, probe) - gs.ntk(model, probe)
    torch.testing.assert_close(step.measured, change, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(step.outputs_measured, (new(probe) - model(probe)).detach(), rtol=1e-9, atol=1e-12)
    assert step.error < 0.02
    assert step.outputs_error[1] < 0.05 * step.outputs_error[0]
    assert step.crossings.kinks == 0
    assert not step.crossing.any()


OPERATIONS = {
    "relu": F.relu,
    "relu in place": lambda z: F.relu(z.clone(), inplace=True),
    "Tensor.relu_": lambda z: z.clone().relu_(),
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "relu6": lambda z: F.relu6(4 * z),
    "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.7),
    "hardsigmoid": lambda z: F.hardsigmoid(4 * z),
    "hardswish": lambda z: F.hardswish(4 * z),
    "softshrink": lambda z: F.softshrink(z, 0.3),
    "abs": lambda z: abs(z),
    "clamp": lambda z: z.clamp(-0.3, 0.4),
    "clamp low": lambda z: torch.clamp(z, min=-0.1),
    "clamp high": lambda z: z.clamp_max(0.2),
    "maximum": lambda z: torch.maximum(z, z.flip(-1) * 0.5),
    "minimum": lambda z: torch.minimum(z, z.flip(-1) * 0.5),
    "prelu": lambda z: F.prelu(z, torch.tensor([0.3], dtype=z.dtype)),
    "max of two": lambda z: torch.max(z, z.flip(-1) * 0.5),
    "min of two": lambda z: z.min(other=z.flip(-1) * 0.5),
    "fmax": lambda z: torch.fmax(z, z.flip(-1) * 0.5),
    "fmin": lambda z: z.fmin(z.flip(-1) * 0.5),
    "elu": lambda z: F.elu(z, 3.0),
    "elu in place": lambda z: F.elu(z.clone(), 0.4, inplace=True),
    "selu": F.selu,
    "selu in place": lambda z: torch.selu_(z.clone()),
    "rrelu": lambda z: F.rrelu(z, 0.1, 0.3),
    "threshold": lambda z: F.threshold(z, 0.2, 0.2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_as_ramps(name):
    """Watched: torch's own values. On its own sides: the same values and slopes. Smoothed: close if narrow."""
    torch.manual_seed(0)
    z = torch.randn(50, 6).double().requires_grad_()
    function = OPERATIONS[name]
    want = function(z)
    (slope,) = torch.autograd.grad(want.sum(), z)
    with Sides() as watched:
        seen = function(z)
    assert torch.equal(seen, want)
    assert watched.sides
    with FixedSides(watched.sides):
        fixed = function(z)
    torch.testing.assert_close(fixed, want, rtol=1e-12, atol=1e-12)
    # torch's hardsigmoid has its slope 1/6 in float32
    torch.testing.assert_close(torch.autograd.grad(fixed.sum(), z)[0], slope, rtol=1e-7, atol=1e-12)
    with Smoothed(1e-4):
        smooth = function(z)
    # A smoothed kink is off by at most h/√(2π) times the change of slope, here at most 2 · 4 + ...
    torch.testing.assert_close(smooth, want, rtol=0, atol=2e-3)


CHOICES = {
    "max": lambda z: z.max(),
    "max along an axis": lambda z: z.max(-1).values,
    "min along an axis": lambda z: torch.min(z, dim=1, keepdim=True)[0],
    "in numpy's words": lambda z: z.max(axis=0, keepdims=True).values,
    "amax": lambda z: z.amax(),
    "amax over axes": lambda z: z.reshape(5, 10, 6).amax((0, 2), keepdim=True),
    "amin over axes": lambda z: torch.amin(z.reshape(5, 10, 6), (-1, 0)),
    "pool with places": lambda z: F.max_pool1d(z[:, None], 2, return_indices=True)[0],
    "adaptive pool with places": lambda z: nn.AdaptiveMaxPool1d(2, return_indices=True)(z[:, None])[0],
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_a_place(name):
    """Watched: torch's own values. On its own sides: the same values and slopes. Smoothed: refused by name."""
    torch.manual_seed(0)
    z = torch.randn(50, 6).double().requires_grad_()
    function = CHOICES[name]
    want = function(z)
    with Sides() as watched:
        seen = function(z)
    assert torch.equal(seen, want)
    assert len(watched.sides) == 1
    with FixedSides(watched.sides):
        fixed, other = function(z), None
    assert torch.equal(fixed, want)
    slope = torch.autograd.grad(want.sum(), z)[0]
    assert torch.equal(torch.autograd.grad(fixed.sum(), z)[0], slope)
    with FixedSides(watched.sides):
        other = function(torch.zeros_like(z) - z)  # the places stay where they were
    assert torch.equal(other, -want)
    with pytest.raises(UnsupportedError, match="has no smooth form"), Smoothed(1e-4):
        function(z)
    data = z.detach()
    with Smoothed(1e-4):
        assert torch.equal(function(data), want)  # data alone has no kinks in the parameters


def halves(z):
    return z.reshape(*z.shape[:-1], -1, 2)


def test_one_function_in_other_words_has_one_split():
    torch.manual_seed(0)
    words = (
        lambda z: F.max_pool1d(z, 2),
        lambda z: halves(z).max(-1).values,
        lambda z: halves(z).amax(-1),
        lambda z: torch.max(z[:, ::2], z[:, 1::2]),
        lambda z: torch.fmax(z[:, ::2], z[:, 1::2]),
    )
    first, last = nn.Linear(3, 40), nn.Linear(20, 1)
    x = torch.randn(6, 3).double()
    loss = lambda f: 0.5 * (f - 1).square().sum()  # noqa: E731
    models = [nn.Sequential(first, Function(function), last).double() for function in words]
    steps = [ntk_step(model, x, loss, lr=0.3) for model in models]
    assert steps[0].crossings.crossed > 0
    for step in steps[1:]:
        assert step.crossings.crossed == steps[0].crossings.crossed
        torch.testing.assert_close(step.crossing, steps[0].crossing, rtol=1e-9, atol=1e-12)
    told = [gs.explain_step(model, x, torch.ones(6, 1).double(), lr=0.3, loss="half_squared") for model in models]
    for step in told[1:]:
        assert step.flip_count == told[0].flip_count > 0
        torch.testing.assert_close(step.by_flips, told[0].by_flips, rtol=1e-9, atol=1e-12)


def test_a_jump_of_slope_in_the_elu_family_is_split_off():
    torch.manual_seed(1)
    for function in (F.selu, lambda z: F.elu(z, 3.0)):
        model = nn.Sequential(nn.Linear(3, 60), Function(function), nn.Linear(60, 1)).double()
        x = torch.randn(8, 3).double()
        steps = [ntk_step(model, x, lambda f: 0.5 * (f - 1).square().sum(), lr) for lr in (4e-3, 2e-3)]
        errors = [(s.measured - s.predicted - s.crossing).norm() for s in steps]
        assert steps[0].crossings.crossed > 0
        assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.2)


ONE = torch.ones((), dtype=torch.float64)
UNFOLLOWED = {
    "aminmax": lambda z: torch.aminmax(halves(z), dim=-1).max,
    "kthvalue": lambda z: halves(z).kthvalue(2, -1).values,
    "quantile": lambda z: halves(z).quantile(0.3, -1),
    "argmax": lambda z: halves(z).gather(-1, halves(z).argmax(-1, keepdim=True))[..., 0],
    "bucketize": lambda z: z * torch.bucketize(z.detach(), 0 * ONE[None]),
    "round": lambda z: z * torch.round(z.detach().clone()),
    "long": lambda z: z * z.long(),
    "copysign": lambda z: torch.copysign(z, ONE),
    "norm": lambda z: halves(z).norm(1, dim=-1),
    "linalg_vector_norm": lambda z: torch.linalg.vector_norm(halves(z), ord=float("inf"), dim=-1),
    "linalg_norm": lambda z: torch.linalg.norm(input=halves(z), ord=1, dim=-1),
    "normalize": lambda z: F.normalize(input=z, p=1),
    "pairwise_distance": lambda z: F.pairwise_distance(z, 0 * z, 1, keepdim=True),
    "div": lambda z: z + torch.div(z, 2.0, rounding_mode="floor"),
    "l1_loss": lambda z: F.l1_loss(z, 0 * z, reduction="none"),
    "smooth_l1_loss": lambda z: F.smooth_l1_loss(z, 0 * z, reduction="none", beta=0.0),
    "margin_ranking_loss": lambda z: F.margin_ranking_loss(z, 0 * z, torch.ones_like(z), reduction="none"),
    "threshold": lambda z: F.threshold(z, 0.1, 0.0),
    "rrelu": lambda z: F.rrelu(z, training=True),
    "hardshrink": nn.Hardshrink(),
    "remainder": lambda z: z % 1,
    "gt": lambda z: z * (z > 0),
    "eq": lambda z: z * (z == z.amax(-1, keepdim=True).detach()),
    "scatter_reduce": lambda z: z.scatter_reduce(1, torch.zeros_like(z, dtype=torch.long), z, "amax"),
}


def _has_derivative(function):
    z = torch.randn(2, 4, requires_grad=True)
    try:
        torch.autograd.grad(function(z).sum(), z)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_each_kink_that_is_not_followed_is_named_and_never_smoothed(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Function(UNFOLLOWED[name]), Function(lambda z: z.sum(-1, keepdim=True)))
    model, x, ones = model.double(), torch.randn(2, 3).double(), torch.ones(2, 1).double()
    if name == "aminmax" and not _has_derivative(UNFOLLOWED[name]):
        pytest.skip("aminmax has no derivative in this version of torch")
    assert name in kink_crossings(model, x, ones, lr=0.1).nonsmooth_ops
    assert any(name in note for note in gs.explain_step(model, x, ones, lr=0.1, loss="half_squared").notes)
    with pytest.raises(UnsupportedError, match="has no smooth form"):
        dntk_velocity(model, x, ones, kink="distributional", bandwidth=0.1)


PLAIN = {
    "celu": lambda z: F.celu(z, 0.5),  # its slope is continuous whatever alpha is
    "elu": F.elu,
    "huber": lambda z: F.smooth_l1_loss(z, 0 * z, reduction="none", beta=0.5),
    "norm": lambda z: z.norm(dim=-1, keepdim=True),
    "sum by lp_pool": lambda z: F.lp_pool1d(z, 1, 2),
    "fixed mask": lambda z: torch.where(torch.arange(4) > 1, z, 0.0),
    "mask in the shape of z": lambda z: torch.where((torch.arange(4) > 1).expand_as(z), z, torch.zeros_like(z)),
    "test for faults": lambda z: z if not torch.isnan(z).any() else 0 * z,
    "division": lambda z: torch.div(z, 2.0),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_has_no_kink_is_neither_named_nor_refused(name):
    torch.manual_seed(0)

    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            scale = x.abs().amax(-1, keepdim=True).round() + (x.sort(-1).values > 0)[:, :1]  # of the data alone
            return PLAIN[name](self.layer(x / (1 + scale))).sum(-1, keepdim=True)

    model, x, ones = Sorted().double(), torch.randn(2, 3).double(), torch.ones(2, 1).double()
    assert kink_crossings(model, x, ones, lr=0.1).nonsmooth_ops == ()
    got = dntk_velocity(model, x, ones, kink="distributional", bandwidth=1e-9)
    torch.testing.assert_close(got, dntk_velocity(model, x, ones), rtol=1e-6, atol=1e-9)


def networks_with_kinks():
    yield (
        "conv",
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)),
        torch.randn(12, 1, 6, 6),
    )

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNN(3, 8, nonlinearity="relu", batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    yield "recurrent", Cell(), torch.randn(12, 3, 3)
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    yield "encoder", nn.Sequential(block, nn.Flatten(), nn.Linear(12, 2)), torch.randn(12, 3, 4)


@pytest.mark.parametrize("name", ["conv", "recurrent", "encoder"])
def test_kinks_inside_networks(name):
    torch.manual_seed(0)
    model, x = next((m.double(), x.double()) for n, m, x in networks_with_kinks() if n == name)
    loss = lambda f: 0.5 * (f - 1).square().sum()  # noqa: E731
    steps = [ntk_step(model, x, loss, lr) for lr in (4e-4, 2e-4)]
    errors = [(step.measured - step.predicted - step.crossing).norm() for step in steps]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)
    assert kink_crossings(model, x, loss, lr=0.02).crossed > 0
    same = Expansion(model, x)
    kept = same.at(torch.zeros(same.cols.size, dtype=torch.float64), keep_sides=True)
    torch.testing.assert_close(kept.f, same.f, rtol=1e-12, atol=1e-12)


def test_what_is_not_followed_is_named():
    model = nn.Sequential(nn.Linear(3, 4), Function(lambda z: torch.where(z > 0, z, 0.0)), nn.Linear(4, 1))
    got = kink_crossings(model, torch.randn(2, 3), torch.ones(2, 1), lr=0.1)
    assert got.nonsmooth_ops == ("gt", "where")
    assert got.kinks == 0
    assert "not followed: gt, where" in str(got)


def test_bad_input():
    model, x = two_layers(8, 0), torch.tensor([[1.0, -0.5]]).double()
    with pytest.raises(InputError, match="lr must be one finite number at least 0"):
        kink_crossings(model, x, torch.ones(1, 1).double(), lr=float("nan"))
    for function in (kink_crossings, ntk_step):
        with pytest.raises(InputError, match="lr must be one finite number at least 0"):
            function(model, x, torch.ones(1, 1).double(), lr=-1.0)
    with pytest.raises(InputError, match="output after the step must be finite"):
        ntk_step(model, x, torch.ones(1, 1).double(), lr=1e200)


def test_a_selu_is_held_without_its_jump_of_slope():
    """selu(z) - J max(z, 0) + J m z, J = scale (1 - alpha), as the page on the dNTK says."""
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for sign in (1.0, -1.0):
        with Sides() as before:
            F.selu(sign * torch.ones_like(z))
        with FixedSides(before.sides):
            held = F.selu(z)
        jump = 1.0507009873554805 * (1 - 1.6732632423543772)
        wanted = F.selu(z) - jump * z.relu() + jump * (sign > 0) * z
        torch.testing.assert_close(held, wanted, rtol=1e-12, atol=1e-12)
