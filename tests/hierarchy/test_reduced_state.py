"""The reduced state against weight-space training, and where closure fails."""

import math

import pytest
import torch
from hypothesis import given, settings

from gramscope.base.errors import InputError
from gramscope.hierarchy import ReducedState, closure, compare_reduced
from hierarchy.chains import cases, close, make
from references import hierarchy as reference


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_overlaps_correlators_metrics_and_kernel(case):
    fields = case.fields()
    state = ReducedState.of(fields, fields.outputs - case.residual)
    assert close(state.residual, case.residual)
    assert close(state.kernel(), torch.stack(reference.layer_kernels(*case.network, case.x)).sum(0), 1e-10)
    flow = torch.einsum("ncmd,md->nc", state.kernel(), case.residual)
    assert close(state.residual_step(0.1), -0.1 * flow, 1e-10)
    for layer in range(1, state.depth + 1):
        x = torch.stack([reference.forward(*(a[:layer] for a in case.network[:3]), one) for one in case.x])
        assert close(state.overlap(layer), x @ x.T, 1e-10)
        g = reference.conjugate(*case.network, case.x, layer)
        b = fields.slopes(layer)[:, None] * g
        assert close(state.correlator(layer), torch.einsum("nci,mdi->ncmd", b, b), 1e-10)
    for layer in range(1, state.depth):
        weight, slopes = case.weights[layer], fields.slopes(layer + 1)
        expected = weight.T @ torch.diag(slopes[0] * slopes[-1]) @ weight
        assert close(state.metric(layer, 0, len(case.x) - 1), expected, 1e-10)


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_ten_steps_of_the_reduced_state_are_those_of_autograd(case):
    """Plain gradient descent by autograd, biases and mask flips included; 1e-10 is rounding times ten steps."""
    state = ReducedState.of(case.fields(), case.fields().outputs - case.residual)
    y = case.fields().outputs - case.residual
    parameters = [w.clone().requires_grad_() for w in case.weights]
    biases = [None if b is None else b.clone().requires_grad_() for b in case.biases]
    free = [*parameters, *(b for b in biases if b is not None)]
    for _ in range(10):
        f = reference.outputs(parameters, biases, case.slopes, case.readout, case.x)
        gradients = torch.autograd.grad((f - y).square().sum() / 2, free)
        with torch.no_grad():
            for p, g in zip(free, gradients, strict=True):
                p -= 0.03 * g
        state = state.stepped(0.03)
    f = reference.outputs(parameters, biases, case.slopes, case.readout, case.x).detach()
    if bool(f.isfinite().all()) and float(f.norm()) < 1e6:
        assert close(state.outputs, f, 1e-10)


def test_comparison_with_weight_space_over_many_steps():
    case = make([4, 7, 6, 5], n=6)
    fields = case.fields()
    y = fields.outputs - case.residual
    found = compare_reduced(fields, y, 0.05, 40)
    assert found.largest < 1e-10
    assert found.residual.shape == (41,)
    assert found.overlaps.shape == found.correlators.shape == (41, 3)
    assert float(found.state.residual.norm()) < 0.9 * float(case.residual.norm())  # it did learn
    assert "2 of 3 weights are carried" in repr(found.state)
    assert "closed" in repr(ReducedState.of(make([3, 4]).fields(), torch.zeros(4, 1).double()))


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_closure_against_the_parts_of_the_pullback(case):
    fields = case.fields()
    if not bool(case.residual.abs().sum() > 0):
        return
    found = closure(fields, case.residual, 1e-3)
    assert all(layer.transported == 0 for layer in found.layers[:1] if not math.isnan(layer.transported))
    for layer in found.layers[:-1]:
        place = layer.layer
        v = (fields.activations[place][:, None] * case.residual[..., None]).flatten()
        levels = [reference.pullback(*case.network, case.x, place, [k]) for k in range(place + 1, fields.depth + 1)]
        if any(b is not None for b in case.biases):
            continue  # the constant input has no row in the reference
        moved = [(a.reshape(len(v), len(v)) @ v) for a in levels]
        total = float(sum(moved).norm())
        if total > 1e-9:
            assert layer.correlator == pytest.approx(float(moved[0].norm()) / total, rel=1e-9)
            assert layer.iterated == pytest.approx(
                float(sum(moved[2:], torch.zeros_like(v)).norm()) / total, rel=1e-8, abs=1e-12
            )


def test_where_closure_fails():
    """One hidden layer closes; transports enter at two; iterated pullbacks at four (eqs. 189 to 192)."""
    for depth in (1, 2, 3, 4):
        case = make([5, *[9] * depth], n=6, seed=3)
        found = closure(case.fields(), case.residual, 1e-3)
        assert found.closes == (depth == 1)
        assert [layer.transported > 0 for layer in found.layers] == [False] + [True] * (depth - 1)
        assert [layer.iterated > 0 for layer in found.layers] == [depth == 4] + [False] * (depth - 1)
        assert ("does not close" in str(found)) == (depth > 1)
        local = found.layers[0]
        assert local.local == pytest.approx(1.0)


def test_bad_input():
    case = make([3, 4])
    with pytest.raises(InputError, match="y must have shape"):
        ReducedState.of(case.fields(), torch.zeros(9))
    with pytest.raises(InputError, match="y must be finite"):
        ReducedState.of(case.fields(), torch.full((4, 1), math.nan))
    state = ReducedState.of(case.fields(), torch.zeros(4, 1))
    with pytest.raises(InputError, match="no pullback metric"):
        state.metric(1, 0, 0)
    with pytest.raises(InputError, match="layer must be a whole number from 1 to 1"):
        state.correlator(2)
    with pytest.raises(InputError, match="lr must be"):
        state.stepped(-1.0)
    with pytest.raises(InputError, match="steps must be"):
        compare_reduced(case.fields(), torch.zeros(4, 1), 0.1, 0)
