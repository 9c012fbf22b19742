"""The accumulated flow and shared activation against loops over pairs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.hierarchy import (
    AccumulatedFlow,
    Fields,
    coactivation_subspace,
    flow_share,
    shared_activation,
)
from references.accumulated_flow import class_overlaps, projector, shares

TIGHT = {"rel": 1e-10, "abs": 1e-10}  # sums of a few hundred float64 terms, in another order


def case(seed, n=7, units=6, width=5):
    rng = np.random.default_rng(seed)
    masks = (rng.random((n, units)) < rng.random(units) * 0.6 + 0.3).astype(float)
    masks[:, 0] = 1.0
    return masks, rng.standard_normal((units, width)), rng


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 5), steps=st.integers(1, 3))
def test_shares_against_projectors_of_every_step(seed, k, steps):
    flow, changes, projectors = AccumulatedFlow(), [], []
    for step in range(steps):
        masks, weight, rng = case(seed + step)
        space = coactivation_subspace(torch.as_tensor(weight), torch.as_tensor(masks), side="input", k=k)
        gap = float(space.values[k - 1] - space.values[k]) if k < 5 else 1.0
        if gap < 1e-4 * float(space.values[0]):
            return  # the k-th direction is arbitrary
        changes.append(rng.standard_normal(weight.shape))
        projectors.append(projector(weight, masks, "input", k))
        flow.add(torch.as_tensor(changes[-1]), space)
    found = flow.share()
    assert (found.share, found.path_share) == pytest.approx(shares(changes, projectors, "input"), **TIGHT)
    assert (found.baseline, found.steps) == (pytest.approx(k / 5), steps)
    np.testing.assert_allclose(flow.inside + flow.outside, sum(changes), rtol=0, atol=1e-12)


def test_the_output_side_selects_neurons_and_dead_ones_get_no_flow():
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1]])
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    space = coactivation_subspace(weight, masks, side="output", k=3)
    assert space.basis.abs().sum(1).tolist() == [1, 1, 0, 1]
    alive = torch.ones(4, 3, dtype=torch.float64)
    alive[2] = 0
    assert flow_share(alive, space).share == pytest.approx(1.0)
    found = flow_share(torch.ones(4, 3), space)
    assert (found.share, found.path_share) == pytest.approx((0.75, 0.75))
    assert found.excess == pytest.approx(0.0)
    expected = projector(weight.numpy(), masks.numpy(), "output", 1)  # eigenvectors of a diagonal matrix
    first = coactivation_subspace(weight, masks, side="output", k=1)
    np.testing.assert_allclose(first.basis @ first.basis.T, expected, atol=1e-12)


def test_the_gradient_flow_of_a_network_adds_up_to_its_change():
    """Eq. 213: the parts inside and outside sum to W(t) - W(0), and every gradient lies where its masks are on."""
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(8, 3, generator=rng).double(), torch.randn(6, 8, generator=rng).double()]
    x, y = torch.randn(10, 3, generator=rng).double(), torch.randn(10, generator=rng).double()
    fields = Fields(weights, x)
    flows = [AccumulatedFlow(), AccumulatedFlow()]
    for _ in range(5):
        after = fields.take_step(fields.outputs - y, 0.2)
        for layer, flow in enumerate(flows, start=1):
            on = fields.masks[layer]
            space = coactivation_subspace(fields.weights[layer - 1], on, side="output", k=int(on.any(0).sum()))
            flow.add(after.weights[layer - 1] - fields.weights[layer - 1], space)
        fields = after
    for flow, before, now in zip(flows, weights, fields.weights, strict=True):
        torch.testing.assert_close(flow.inside + flow.outside, now - before, rtol=0, atol=1e-13)
        assert flow.share().share == pytest.approx(1.0, abs=1e-12)  # no gradient outside the units that are on


def test_the_size_of_the_subspace_follows_the_spectrum():
    one = coactivation_subspace(torch.eye(6), torch.tensor([[1, 0, 0, 0, 0, 0]] * 3), side="input")
    assert (one.k, one.baseline) == (1, pytest.approx(1 / 6))
    assert coactivation_subspace(torch.eye(6), torch.ones(3, 6)).k == 6
    assert math.isnan(AccumulatedFlow().share().share)
    flow = AccumulatedFlow()
    flow.add(torch.zeros(6, 6), one)
    assert flow.share().steps == 0


ONE = coactivation_subspace(torch.eye(1), torch.ones(2, 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: coactivation_subspace(torch.eye(2), torch.ones(3, 2), side="left"), "side must be"),
        (lambda: coactivation_subspace(torch.eye(2), torch.ones(3, 2), k=3), "k must be a whole number from 1 to 2"),
        (lambda: coactivation_subspace(torch.eye(2), torch.zeros(3, 2)), "no two examples share a unit"),
        (lambda: coactivation_subspace(torch.eye(3), torch.ones(3, 2)), "one column for each row"),
        (lambda: flow_share(torch.ones(2, 3), coactivation_subspace(torch.eye(2), torch.ones(3, 2))), "2 columns"),
        (lambda: flow_share(torch.tensor([[math.nan]]), ONE), "finite"),
        (lambda: shared_activation(torch.ones(3, 2), torch.zeros(3).long()), "pairs within a class"),
        (lambda: shared_activation(torch.ones(3, 2), torch.arange(3)), "pairs within a class"),
        (lambda: shared_activation(torch.ones(3, 2), torch.tensor([0.0, 1.0, 1.0])), "whole numbers"),
        (lambda: shared_activation(torch.ones(3, 2), torch.tensor([0, 1])), "one for each of the 3"),
        (lambda: shared_activation(torch.ones(3, 2), torch.tensor([0, 1, 1]), overlap="jaccard"), "overlap must be"),
        (lambda: shared_activation(torch.ones(3, 2), torch.tensor([0, 1, 1]), permutations=-1), "at least 0"),
    ],
)  # fmt: skip
def test_bad_input(call, words):
    with pytest.raises(InputError, match=words):
        call()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), overlap=st.sampled_from(["cosine", "units"]), silent=st.booleans())
def test_shared_activation_against_loops(seed, overlap, silent):
    masks, _, rng = case(seed)
    labels = np.array([0, 0, 1, 1, 5, 5, 5])[rng.permutation(7)]
    if silent:
        masks[int(rng.integers(7))] = 0
    found = shared_activation(torch.as_tensor(masks), torch.as_tensor(labels), overlap=overlap, permutations=3)
    assert (found.within, found.between) == pytest.approx(class_overlaps(masks, labels, overlap), **TIGHT)
    assert found.silent == (1 if silent and overlap == "cosine" else 0)


def test_the_null_covers_unrelated_labels_and_not_related_ones():
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    prototypes = torch.rand(3, 40, generator=rng) < 0.5
    noise = torch.rand(120, 40, generator=rng) < 0.3
    related = shared_activation(prototypes[labels] ^ noise, labels)
    assert related.z > 20
    assert related.p_value == pytest.approx(1 / 201)
    unrelated = shared_activation(torch.rand(120, 40, generator=rng) < 0.5, labels)
    assert abs(unrelated.z) < 3
    assert unrelated.null_mean == pytest.approx(0, abs=3 * unrelated.null_std / 200**0.5)
    again = shared_activation(prototypes[labels] ^ noise, labels)
    assert (again.null_mean, again.null_std) == (related.null_mean, related.null_std)  # seeded


def test_subspace_and_flow_show_themselves():
    masks = torch.tensor([[True, False, False], [True, True, False]])
    space = coactivation_subspace(torch.eye(3), masks, side="output", k=1)
    lines = space.plot().axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [space.values.tolist(), space.values[:1].tolist()]
    flow = AccumulatedFlow()
    flow.add(torch.eye(3), space)
    assert "share=0.3333" in repr(flow)
