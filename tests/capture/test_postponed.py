"""Gain and offset of a batch norm behind a convolution, from the gradients of the convolution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.capture.capture import captured_by_example
from gramscope.capture.postponed import OFF_CENTRE, SMALLEST, Postponed
from gramscope.kernels.ntk import contracted
from in_parts import snapshot_in_parts
from references.jacobian import assert_kernel_close, reference_ntk


def norm(channels, *, mean=1.0, smallest=0.3, affine=True):
    """A batch norm with statistics, gains and offsets of its own."""
    layer = nn.BatchNorm2d(channels, affine=affine)
    layer.running_mean.normal_().mul_(mean)
    layer.running_var.uniform_(0.5, 2.0)
    if affine:
        nn.init.uniform_(layer.weight, smallest, 2.0).data.mul_(torch.randn(channels).sign())
        nn.init.normal_(layer.bias)
    return layer


def network(*, seed=0, bias=True, groups=1, stride=1, kernel=3, channels=4, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(2, channels, kernel, padding=padding, stride=stride, bias=bias),
        norm(channels, **options),
        nn.LeakyReLU(0.3),
        nn.Conv2d(channels, channels, kernel, padding=padding, groups=groups, bias=bias),
        norm(channels, **options),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ).eval().to(dtype)  # fmt: skip


def data(n=5, size=6, dtype=torch.float64):
    return torch.randn(n, 2, size, size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def moved(model, x):
    """Names of the parameters that wait for the convolution before them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with captured_by_example(model, x) as one_pass:
        assert one_pass.apart
        waiting = [use.use for step in one_pass.backward._postponed for use in step.uses if isinstance(use, Postponed)]
        return sorted(names[id(use.weight.roots[0])] for use in waiting)


def check(model, x, tolerance):
    """Every parameter by itself, in parts of two examples, against one gradient at a time in float64."""
    for trace, reduce in ((False, "none"), (True, "trace")):
        snapshot = snapshot_in_parts(model, x, len(x), 2, trace=trace)
        kernels = contracted(snapshot, trace=trace, by_site=True)
        expected = reference_ntk(model, x, reduce=reduce, by_site=True)
        assert kernels.keys() == expected.keys()
        for name, kernel in kernels.items():
            assert_kernel_close(kernel, expected[name], tolerance, name=name)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000), bias=st.booleans(), groups=st.sampled_from([1, 2, 4]), stride=st.sampled_from([1, 2, 3]),
    kernel=st.sampled_from([1, 3]), mean=st.sampled_from([0.0, 1.0]), size=st.integers(3, 7),
)  # fmt: skip
def test_against_brute_force(seed, bias, groups, stride, kernel, mean, size):
    x = data(size=size)
    model = network(seed=seed, bias=bias, groups=groups, stride=stride, kernel=kernel, mean=mean)
    model(x)
    assert moved(model, x) == ["1.bias", "1.weight", "4.bias", "4.weight"]
    check(model, x, 1e-11)  # sums of opposite sign, of a mean several times the spread


@pytest.mark.parametrize("shift", [0.0, 10.0])
def test_float32(shift):
    """Statistics of the data themselves, which lie off zero as inputs do: sums of opposite sign cancel."""
    x = data(n=6, size=12, dtype=torch.float32) + shift
    model = network(dtype=torch.float32)
    for place in (0, 3):
        u = model[: place + 1](x).detach()
        model[place + 1].running_mean.copy_(u.mean((0, 2, 3)))
        model[place + 1].running_var.copy_(u.var((0, 2, 3)))
    model(x)
    off = model[1].running_mean / model[1].running_var.sqrt()
    assert (float(off.abs().max()) > OFF_CENTRE / 4) == (shift > 0)
    assert "1.weight" in moved(model, x)
    check(model, x, 1e-5)


def test_gain_or_offset_alone():
    x = data()
    for frozen, left in (("weight", ["1.bias", "4.bias"]), ("bias", ["1.weight", "4.weight"])):
        model = network()
        model(x)
        for layer in (model[1], model[4]):
            getattr(layer, frozen).requires_grad_(False)
        assert moved(model, x) == left
        check(model, x, 1e-11)


def test_a_convolution_that_is_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm = nn.Conv2d(2, 2, 3, padding=1), norm(2)
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            x = torch.sin(self.norm(self.first(x)))
            return self.head(torch.sin(self.norm(self.first(x))).mean((2, 3)))

    model, x = Twice().eval().double(), data()
    assert moved(model, x) == ["norm.bias", "norm.bias", "norm.weight", "norm.weight"]
    check(model, x, 1e-11)


class Between(nn.Module):
    """A convolution and a batch norm with something in between, or beside."""

    def __init__(self, between, channels=4):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.between = nn.Conv2d(2, channels, 3, padding=1), norm(channels), between
        self.head = nn.Linear(channels, 3)

    def forward(self, x):
        return self.head(self.between(self.conv, self.norm, x).mean((2, 3)))


NOT_MOVED = {
    "something in between": lambda conv, norm, x: norm(conv(x).tanh()).sin(),
    "overwritten in between": lambda conv, norm, x: norm(conv(x).add_(1.0)).sin(),
    "read by another as well": lambda conv, norm, x: norm(u := conv(x)).sin() + u.square(),
    "added to itself": lambda conv, norm, x: norm(u := conv(x)).sin() + u,
}


@pytest.mark.parametrize("name", NOT_MOVED)
def test_where_signals_at_the_map_are_not_those_of_the_norm(name):
    model, x = Between(NOT_MOVED[name]).eval().double(), data()
    assert moved(model, x) == []
    check(model, x, 1e-11)


def test_a_gain_of_zero_or_a_mean_far_away_waits_for_nobody():
    """The last norm of a residual block often begins with gains of zero."""
    x = data()
    for change in (
        lambda layer: layer.weight.data[1:2].zero_(),
        lambda layer: layer.weight.data.mul_(SMALLEST / 10),
        lambda layer: layer.running_mean.fill_(1e3),
    ):
        model = network()
        model(x)
        change(model[1])
        assert moved(model, x) == ["4.bias", "4.weight"]
        check(model, x, 1e-9)  # the mean is a thousand times the spread, and brute force rounds as well


def test_a_norm_without_parameters_and_frozen_convolutions():
    x = data()
    model = network(affine=False)
    model(x)
    assert moved(model, x) == []
    check(model, x, 1e-11)
    model = network()
    model(x)
    model[0].weight.requires_grad_(False)
    assert moved(model, x) == ["4.bias", "4.weight"]
    check(model, x, 1e-11)
    model = network()
    model(x)
    model[0].bias.requires_grad_(False)  # frozen, and yet part of what the norm sees
    assert moved(model, x) == ["1.bias", "1.weight", "4.bias", "4.weight"]
    check(model, x, 1e-11)


def test_weights_that_are_not_parameters():
    x = data()
    model = network()
    model(x)
    nn.utils.parametrizations.weight_norm(model[0])
    assert moved(model, x) == ["4.bias", "4.weight"]
    check(model, x, 1e-11)


def test_a_snapshot_has_the_same_sites():
    model, x = network(), data()
    model(x)
    whole, parts = gs.capture(model, x), snapshot_in_parts(model, x, len(x), 2, trace=False)
    assert [(site.name, site.rule) for site in parts.sites] == [(site.name, site.rule) for site in whole.sites]
    for mine, theirs in zip(parts.sites, whole.sites, strict=True):
        torch.testing.assert_close(mine.rows(), theirs.rows(), rtol=1e-10, atol=1e-12)
