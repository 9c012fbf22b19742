"""The target-linearity regulariser against weighted least squares and finite differences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.measures import LinearityPenalty, LinearityRegularizer, linearity_penalty
from references.linearity_training import finite_difference, penalty


def case(seed, n=9, width=4):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 3)
    return rng.standard_normal((n, width)) + 2.0, labels, np.eye(3)[labels]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 12), ridge=st.sampled_from([1e-3, 0.1, 2.0]))
def test_value_and_gradient(seed, width, ridge):
    features, labels, hot = case(seed, width=width)
    h = torch.as_tensor(features).requires_grad_()
    value = linearity_penalty(h, torch.as_tensor(labels), ridge=ridge)
    assert float(value.detach()) == pytest.approx(penalty(features, hot, ridge), rel=1e-10, abs=1e-12)
    value.backward()
    expected = finite_difference(lambda f: penalty(f, hot, ridge), features)
    np.testing.assert_allclose(h.grad, expected, rtol=1e-5, atol=1e-8)  # that of the differences


def test_without_a_ridge_to_speak_of_it_is_target_linearity():
    features, labels, hot = case(0, n=30)
    h, y = torch.as_tensor(features), torch.as_tensor(labels)
    expected = 1 - float(gs.measures.target_linearity(h, y, center=True))
    assert float(linearity_penalty(h, y, ridge=1e-13)) == pytest.approx(expected, abs=1e-10)
    assert float(linearity_penalty(h, torch.as_tensor(hot[:, 0]), ridge=1e-13)) == pytest.approx(
        1 - float(gs.measures.target_linearity(h, torch.as_tensor(hot[:, 0]), center=True)), abs=1e-10
    )


def test_a_stream_averages_batches_and_its_gradient_is_that_of_the_average():
    features, labels, hot = case(1, n=24, width=3)
    parts = [slice(0, 8), slice(8, 18), slice(18, 24)]
    plain = LinearityPenalty(3, 3, momentum=None, ridge=1e-2).double()
    for part in parts:
        h = torch.as_tensor(features[part]).requires_grad_()
        value = plain(h, torch.as_tensor(labels[part]))
    assert float(value.detach()) == pytest.approx(penalty(features, hot, 1e-2), rel=1e-10)
    assert plain.target_linearity() == pytest.approx(1 - penalty(features, hot, 1e-2), rel=1e-10)
    value.backward()

    def whole(last):
        return penalty(np.concatenate([features[:18], last]), hot, 1e-2)

    expected = finite_difference(whole, features[18:]) * 24 / 6  # the batch has a quarter of the weight
    np.testing.assert_allclose(h.grad, expected, rtol=1e-5, atol=1e-8)


def test_momentum_weighs_batches_and_evaluation_keeps_the_moments():
    features, labels, hot = case(2, n=16, width=3)
    running = LinearityPenalty(3, 3, momentum=0.25, ridge=1e-2).double()
    with torch.no_grad():
        for part in (slice(0, 8), slice(8, 16)):
            value = running(torch.as_tensor(features[part]), torch.as_tensor(labels[part]))
    weights = np.repeat([0.75 / 8, 0.25 / 8], 8)
    assert float(value) == pytest.approx(penalty(features, hot, 1e-2, weights), rel=1e-10)
    before = {k: v.clone() for k, v in running.state_dict().items()}
    running.eval()(torch.as_tensor(features[:8]), torch.as_tensor(labels[:8]))
    assert all(torch.equal(v, before[k]) for k, v in running.state_dict().items())
    fresh = LinearityPenalty(3, 3, momentum=0.25, ridge=1e-2).double()
    fresh.load_state_dict(before)
    assert fresh.target_linearity() == running.target_linearity()


def test_one_class_is_refused_in_a_batch_and_taken_in_a_stream():
    features, labels, _ = case(3, n=12)
    h, one = torch.as_tensor(features), torch.zeros(12).long()
    with pytest.raises(InputError, match="hold one class"):
        linearity_penalty(h, one)
    stream = LinearityPenalty(4, 3).double()
    with pytest.raises(InputError, match="hold one class"):
        stream(h, one)
    assert int(stream.batches) == 0  # nothing half-written
    stream(h, torch.as_tensor(labels))
    assert 0 <= float(stream(h, one)) <= 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linearity_penalty(torch.randn(4, 2), torch.arange(4) % 2, ridge=0.0), "ridge must be"),
        (lambda: linearity_penalty(torch.randn(4, 2), torch.arange(3)), "one row for each of the 4"),
        (lambda: linearity_penalty(torch.randn(4, 2), torch.tensor([0, 1, -100, 1])), "label -100"),
        (lambda: linearity_penalty(torch.ones(4, 2).long(), torch.arange(4) % 2), "floating tensor"),
        (lambda: linearity_penalty(torch.full((4, 2), torch.nan), torch.arange(4) % 2), "features must be finite"),
        (lambda: LinearityPenalty(2, 2, momentum=0.0), "momentum must lie"),
        (lambda: LinearityPenalty(2, 2)(torch.randn(4, 3), torch.arange(4) % 2), "2 and 2 columns"),
        (lambda: LinearityPenalty(2, 2).target_linearity(), "seen none"),
        (lambda: LinearityRegularizer(nn.Linear(2, 2), "", targets=2)(torch.arange(4)), "must have run"),
        (lambda: LinearityRegularizer(nn.Linear(2, 2), "head", targets=2), "nothing matches"),
        (lambda: LinearityRegularizer(nn.Linear(2, 2), "", targets=2, reduce="unfold"), "one row for each"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_features_that_do_not_vary_have_full_penalty_and_no_gradient():
    h = torch.ones(4, 2, requires_grad=True)
    value = linearity_penalty(h, torch.arange(4) % 2)
    value.backward()
    assert float(value.detach()) == 1.0
    assert h.grad.isfinite().all()


def test_the_regulariser_in_a_loop_raises_target_linearity_and_leaves_no_hook():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=rng)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def trained(strength):
        model = gs.tasks.mlp((6, 24, 24, 2), seed=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        with LinearityRegularizer(model, ["1", "3"], targets=2, momentum=0.5) as regularizer:
            for _ in range(40):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                (loss + strength * regularizer(y)).backward()
                optimizer.step()
            found = regularizer.target_linearity()
        assert list(found) == ["1", "3"]
        assert not any(module._forward_hooks for module in model.modules())
        return gs.measures.layer_target_linearity(model, x, y, "1", center=True)["1"]

    assert trained(2.0) > trained(0.0) + 0.02


def test_layers_that_return_tuples_and_run_time_first():
    model = nn.LSTM(3, 4)
    with LinearityRegularizer(model, "", targets=2, reduce="last") as regularizer:
        states = model(torch.randn(5, 6, 3))[0]
        found = regularizer(torch.arange(6) % 2)
    expected = linearity_penalty(states[-1], torch.arange(6) % 2)  # the last time step of six examples
    torch.testing.assert_close(found, expected)


def test_convolutions_are_pooled_and_half_precision_is_summed_in_float32():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(12, 2)).bfloat16()
    x, y = torch.randn(8, 1, 3, 3).bfloat16(), torch.arange(8) % 2
    with LinearityRegularizer(model, "0", targets=2) as regularizer:
        model(x)
        value = regularizer(y)
        value.backward()
        assert value.dtype == torch.float32
        assert regularizer.penalties["0"].width == 3
        with torch.no_grad():
            model(x)
        with pytest.raises(InputError, match="must have run"):
            regularizer(y)
    assert model[0].weight.grad is not None
