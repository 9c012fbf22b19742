"""Residual networks and convolutions: recursions against sampled networks and against brute force."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.theory import FiniteWidthConv1d, FiniteWidthMLP, ensemble
from gramscope.theory.gaussian_expectations import gaussian_moments
from gramscope.theory.recursions import next_layer
from references.infinite_width_conv import conv_kernels
from references.residual import output_F_and_B, sampled_output
from references.sampled_networks import sampled_tensors

RATES = {"C_b": 0.1, "C_W": 1.3, "lambda_b": 0.4, "lambda_W": 0.8}
X = torch.tensor([[1.0, -0.5], [0.3, 0.8]], dtype=torch.float64)
SIGNALS = torch.tensor([[[1.0, -0.5, 0.7]], [[0.3, 0.8, -1.2]]], dtype=torch.float64)


def flat_layers(sizes):
    """Standard deviations and learning rates of layers (fan_out, fan_in, filter) with biases, as one vector each."""
    stds, rates = [], []
    for fan_out, fan_in, k in sizes:
        count, width = fan_out * fan_in * k, fan_in * k
        stds += [torch.full((count,), math.sqrt(RATES["C_W"] / width)), torch.full((fan_out,), math.sqrt(RATES["C_b"]))]
        rates += [torch.full((count,), RATES["lambda_W"] / width), torch.full((fan_out,), RATES["lambda_b"])]
    return torch.cat(stds).double(), torch.cat(rates).double()


def unpacked(theta, sizes):
    for fan_out, fan_in, k in sizes:
        count = fan_out * fan_in * k
        yield theta[:count].reshape(fan_out, fan_in, k), theta[count : count + fan_out]
        theta = theta[count + fan_out :]


def residual_network(n, depth, skip, activation=torch.tanh):
    sizes = [(n, 2, 1)] + [(n, n, 1)] * (depth - 1)

    def network(theta):
        z = None
        for W, b in unpacked(theta, sizes):
            z = X @ W[..., 0].T + b if z is None else skip * z + activation(z) @ W[..., 0].T + b
        return z

    return network, *flat_layers(sizes)


def conv_network(x, channels, padding, pooled):
    """Filters of size 3 and, if pooled, a dense layer on means; outputs (samples or (sample, position), channels)."""
    sizes = [(b, a, 3) for a, b in pairwise(channels)]
    if pooled:
        sizes[-1] = (*sizes[-1][:2], 1)

    def network(theta):
        z = x
        for place, (W, b) in enumerate(unpacked(theta, sizes)):
            z = torch.sin(z) if place else z
            if W.shape[2] == 1:
                return z.mean(2) @ W[..., 0].T + b
            ends = (z[..., -1:], z[..., :1]) if padding == "circular" else [torch.zeros_like(z[..., :1])] * 2
            wide = torch.cat([ends[0], z, ends[1]], dim=2)
            parts = [torch.einsum("ij,njp->nip", W[..., k], wide[..., k : k + z.shape[2]]) for k in range(3)]
            z = sum(parts) + b[None, :, None]
        return z.transpose(1, 2).reshape(-1, z.shape[1])

    return network, *flat_layers(sizes)


def assert_within_errors(measured, layer, largest=4.5, rms=3.0):
    """Every pull below ``largest``, and those of a tensor below ``rms`` in the mean: its components move together."""
    for name, tensor in layer.tensors().items():
        mean, error = measured[name]
        gap = (mean - tensor).abs()  # a tensor may be zero in every network, and must be so in theory
        pulls = torch.where(gap <= 1e-12, 0.0, gap / error)
        assert float(pulls.max()) < largest, f"{name}: pull {float(pulls.max()):.2f}"
        assert float(pulls.square().mean().sqrt()) < rms, f"{name}: rms pull {float(pulls.square().mean().sqrt()):.2f}"


def extrapolated(narrow, wide):
    """From widths n and 2n to 1/n = 0."""
    pairs = {name: (narrow[name], wide[name]) for name in narrow}
    return {name: (2 * b - a, (4 * eb**2 + ea**2).sqrt()) for name, ((a, ea), (b, eb)) in pairs.items()}


def test_residual_layers_against_sampled_networks():
    """Two layers: exact at every width, so that any disagreement is an error; a plain layer is far outside."""
    n, skip = 4, 0.7
    measured = sampled_tensors(*residual_network(n, 2, skip), len(X), n, 4000)
    assert_within_errors(measured, FiniteWidthMLP([2, n, n], "tanh", skip=[0, skip], **RATES).flow(X)[2])
    with pytest.raises(AssertionError):
        assert_within_errors(measured, FiniteWidthMLP([2, n, n], "tanh", **RATES).flow(X)[2])


def test_residual_layers_with_a_kink_against_sampled_networks():
    """ReLU as autograd differentiates it; s'' = δ of the other reading is not what a sampled network has."""
    n, skip = 4, 0.7
    measured = sampled_tensors(*residual_network(n, 2, skip, torch.relu), len(X), n, 4000)
    theory = FiniteWidthMLP([2, n, n], "relu", skip=[0, skip], **RATES)
    assert_within_errors(measured, theory.flow(X, kink="autograd")[2])
    with pytest.raises(AssertionError, match="P: pull"):
        assert_within_errors(measured, theory.flow(X, kink="distributional")[2])


@pytest.mark.parametrize("skip", [0.4, 1.0, 1.7])
def test_above_a_residual_layer_a_neuron_remembers_itself(skip):
    """F and B over two layers of one neuron, written out; without that memory B is 0.2 to 5 % less."""
    x = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    layers = FiniteWidthMLP([2, 8, 8, 3], "tanh", skip=[0, skip, 0], **RATES).flow(x)
    K, Theta = ([float(getattr(layers[place], name)) for place in (1, 2)] for name in ("K", "Theta"))
    F, B = output_F_and_B(K, Theta, skip, RATES["C_W"])
    # The quadrature of the library is refined to 1e-10.
    assert float(layers[3].F) == pytest.approx(F, rel=1e-8)
    assert float(layers[3].B) == pytest.approx(B, rel=1e-8)
    forgetful = next_layer(layers[2], gaussian_moments("tanh", layers[2].K), layers.rates[2], 1.0)
    assert 0.95 * B < float(forgetful.B) < 0.998 * B


def test_above_a_residual_layer_against_sampled_networks():
    """Widths 24 and 48 extrapolated; what a recursion without the memory of a neuron says is far outside."""
    skip, x = 1.5, torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    layers = FiniteWidthMLP([2, 8, 8, 3], "tanh", skip=[0, skip, 0], **RATES).flow(x)
    start = float(layers[1].K), float(layers[1].Theta)
    narrow, wide = (sampled_output(n, 3000, *start, skip, RATES, n) for n in (24, 48))
    forgetful = next_layer(layers[2], gaussian_moments("tanh", layers[2].K), layers.rates[2], 1.0)
    for name in "FBPQ":
        (a, ea), (b, eb) = narrow[name], wide[name]
        mean, error = 2 * b - a, (4 * eb**2 + ea**2) ** 0.5
        assert abs(mean - float(getattr(layers[3], name))) < 4 * error, name
        assert abs(mean - float(getattr(forgetful, name))) > 3 * error, name


@pytest.mark.full
def test_deep_residual_layers_against_sampled_networks():
    """Three layers, two of them residual, widths 5 and 10 extrapolated; without the last skip far outside."""
    skip = 0.7
    measured = [
        sampled_tensors(*residual_network(n, 3, skip), 2, n, count, n, 100) for n, count in ((5, 12000), (10, 5000))
    ]
    theory = FiniteWidthMLP([2, 8, 8, 8], "tanh", skip=[0, skip, skip], **RATES)
    assert_within_errors(extrapolated(*measured), theory.flow(X)[3])
    wrong = FiniteWidthMLP([2, 8, 8, 8], "tanh", skip=[0, skip, 0], **RATES)
    with pytest.raises(AssertionError):
        assert_within_errors(extrapolated(*measured), wrong.flow(X)[3])


@given(seed=st.integers(0, 1000))
@settings(max_examples=3, deadline=None)
def test_limits_of_the_skip(seed):
    """δ = 0 is a plain network; with weights that do nothing a layer with δ hands every tensor on."""
    x = torch.randn(2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain = FiniteWidthMLP([2, 8, 8, 1], "sin", **RATES).flow(x)
    none = FiniteWidthMLP([2, 8, 8, 1], "sin", skip=0.0, **RATES).flow(x)
    for name, tensor in plain[3].tensors().items():
        assert torch.equal(none[3].tensors()[name], tensor)
    still = dict(RATES, C_W=[1.3, 1.3, 1e-14], C_b=[0.1, 0.1, 0], lambda_b=[0.4, 0.4, 0], lambda_W=[0.8, 0.8, 0])
    before = FiniteWidthMLP([2, 8, 8, 8], "sin", skip=[0, 0.5, 0.9], **still).flow(x)
    powers = {"K": 2, "Theta": 2} | dict.fromkeys("VDFABPQ", 4)
    for name, tensor in before[2].tensors().items():
        want = 0.9 ** powers[name] * tensor
        torch.testing.assert_close(before[3].tensors()[name], want, rtol=1e-10, atol=1e-10 * float(want.abs().max()))


def test_infinite_width_of_residual_networks_is_that_of_the_flow():
    net = FiniteWidthMLP([2, 16, 16, 16, 1], "relu", skip=0.8, C_b=0.2, C_W=1.1, lambda_b=0.3)
    found, last = net.infinite_width(X), net.flow(X)[4]
    torch.testing.assert_close(found.nngp, last.K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.ntk, last.Theta, rtol=1e-12, atol=1e-12)
    near = torch.cat([X, X[:1] + 1e-5])  # decimals: two inputs at a small angle
    torch.testing.assert_close(net.flow(near)[4].K[:2, :2], last.K, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", ["circular", "zeros"])
def test_pooled_convolutions_against_sampled_networks(padding):
    """One convolution and the pooled output: exact at every number of channels."""
    measured = sampled_tensors(*conv_network(SIGNALS, [1, 3, 3], padding, pooled=True), 2, 3, 6000)
    theory = FiniteWidthConv1d([1, 3, 3], 3, "sin", padding=padding, **RATES)
    assert_within_errors(measured, theory.flow(SIGNALS)[2])
    if padding == "zeros":
        other = FiniteWidthConv1d([1, 3, 3], 3, "sin", padding="circular", **RATES)
        with pytest.raises(AssertionError):
            assert_within_errors(measured, other.flow(SIGNALS)[2], largest=4.5)


def test_a_convolution_on_a_convolution_against_sampled_networks():
    """The second layer at each position: which pairs of positions share their weights."""
    measured = sampled_tensors(*conv_network(SIGNALS[:1], [1, 3, 3], "zeros", pooled=False), 3, 3, 3000)
    theory = FiniteWidthConv1d([1, 3, 3, 1], 3, "sin", padding="zeros", **RATES)
    assert_within_errors(measured, theory.flow(SIGNALS[:1])[2])


@pytest.mark.full
def test_two_convolutions_and_pooling_against_sampled_networks():
    measured = [
        sampled_tensors(*conv_network(SIGNALS[:1], [1, n, n, 4], "zeros", pooled=True), 1, n, count, n, 100)
        for n, count in ((5, 16000), (10, 8000))
    ]
    theory = FiniteWidthConv1d([1, 8, 8, 1], 3, "sin", padding="zeros", **RATES)
    assert_within_errors(extrapolated(*measured), theory.flow(SIGNALS[:1])[3])


@pytest.mark.parametrize(("padding", "activation"), [("circular", "tanh"), ("zeros", "relu")])
def test_infinite_channels_against_brute_force(padding, activation):
    x = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net = FiniteWidthConv1d([2, 8, 8, 1], 3, activation, padding=padding, **RATES)
    found = net.infinite_width(x, x[:1])
    function = {"tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2), "relu": None}[activation]
    nngp, ntk = conv_kernels(x.numpy(), 3, padding, function, depth=3, **RATES)
    tight = 1e-10 if activation == "relu" else 1e-9  # quadrature of tanh, both by grids
    np.testing.assert_allclose(found.nngp.numpy(), nngp[:, :1], rtol=tight)
    np.testing.assert_allclose(found.ntk.numpy(), ntk[:, :1], rtol=tight)
    if activation == "relu":
        last = net.flow(x[:1, :, :3])[3]
        again = net.infinite_width(x[:1, :, :3])
        torch.testing.assert_close(again.nngp, last.K, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(again.ntk, last.Theta, rtol=1e-10, atol=1e-10)


def test_one_position_is_a_fully_connected_network():
    x = X.T[None].permute(2, 1, 0)  # two inputs of two channels at one position
    conv = FiniteWidthConv1d([2, 8, 4, 1], 1, "sin", **RATES).flow(x)
    mlp = FiniteWidthMLP([2, 8, 4, 1], "sin", **RATES).flow(X)
    for name, tensor in mlp[3].tensors().items():
        torch.testing.assert_close(conv[3].tensors()[name], tensor, rtol=1e-12, atol=1e-12)


def test_bad_input():
    with pytest.raises(InputError, match="layer 3 has width 4 over 8 below"):
        FiniteWidthMLP([2, 8, 8, 4, 1], skip=0.5).flow(X)
    with pytest.raises(InputError, match="one for each of the 3 layers, got 2"):
        FiniteWidthMLP([2, 8, 8, 1], skip=[0, 1]).flow(X)
    with pytest.raises(InputError, match="skip must be finite and >= 0"):
        FiniteWidthMLP([2, 8, 8, 1], skip=-1.0)
    with pytest.raises(InputError, match="with a skip are not sampled"):
        ensemble(FiniteWidthMLP([2, 8, 8, 1], "sin", skip=1.0).flow(X))
    with pytest.raises(InputError, match="kernel_size must be odd"):
        FiniteWidthConv1d([1, 4, 1], 2)
    with pytest.raises(InputError, match="padding must be"):
        FiniteWidthConv1d([1, 4, 1], 3, padding="same")
    with pytest.raises(InputError, match="three numbers or more"):
        FiniteWidthConv1d([1, 4], 3)
    net = FiniteWidthConv1d([1, 4, 1], 3)
    with pytest.raises(InputError, match=r"shape \(n, 1, positions\)"):
        net.flow(X)
    with pytest.raises(InputError, match="at least kernel_size = 3 positions"):
        net.infinite_width(SIGNALS[..., :2])
    with pytest.raises(InputError, match="x2 must have the channels and positions"):
        net.infinite_width(SIGNALS, torch.ones(1, 1, 4))
