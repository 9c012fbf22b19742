from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.hierarchy import predict_trajectory
from hierarchy.chains import cases, close, make
from references import hierarchy as reference

NETS = {
    f"depth {depth}, {outputs} outputs{', biases' if bias else ''}": make(
        [4, 7, 5, 6, 3, 8, 4][: depth + 1], outputs=outputs, n=5, bias=bias, seed=depth
    )
    for depth in range(1, 7)
    for outputs, bias in ((1, False), (3, True))
}


def slope(errors: list[float]) -> float:
    """The power of lr that the errors follow, from a straight line through their logarithms."""
    steps = torch.arange(len(errors), dtype=torch.float64)
    logs = torch.tensor(errors, dtype=torch.float64).log2()
    return -float(((steps - steps.mean()) * (logs - logs.mean())).sum() / (steps - steps.mean()).square().sum())


def errors_by_field(comparison) -> dict[str, float]:
    error = comparison.measured - comparison.predicted
    fields = {"f": error.outputs}
    fields |= {f"x{i}": e for i, e in enumerate(error.activations)}
    fields |= {f"g{i}": e for i, e in enumerate(error.conjugates)}
    return {name: float(e.norm()) for name, e in fields.items()}


@pytest.mark.parametrize("name", NETS)
def test_the_prediction_errs_at_second_order(name):
    """As lr halves, the absolute error of every field falls fourfold."""
    case = NETS[name]
    fields = case.fields()
    rate = 1e-3 / float(fields.loss_decrease(case.residual).sum()) ** 0.5
    comparisons = [fields.compare_step(case.residual, rate / 2**k) for k in range(6)]
    assert all(sum(c.flips) == 0 for c in comparisons), "choose a smaller step: flips are of another order"
    found = [errors_by_field(c) for c in comparisons]
    checked = 0
    for field in found[0]:
        sizes = [errors[field] for errors in found]
        if sizes[0] < 1e-12:  # exact: x^1 is linear in W^1, g^{L-1} in W^L, and f where there is one layer
            continue
        assert slope(sizes) == pytest.approx(2.0, abs=0.1), field
        checked += 1
    if fields.depth > 1:
        assert checked >= fields.depth - 1
    else:
        assert checked == 0


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_parts_sum_to_the_truth(case):
    """A large step, flips and all: true = predicted + second order + flips, and the truth is gradient descent's."""
    fields = case.fields()
    lr = 0.3
    comparison = fields.compare_step(case.residual, lr)
    weights, biases = fields.gradients(case.residual)
    moved = [w - lr * g for w, g in zip(case.weights, weights, strict=True)]
    shifted = [b if g is None else b - lr * g for b, g in zip(case.biases, biases, strict=True)]
    wanted = reference.outputs(moved, shifted, case.slopes, case.readout, case.x)
    assert close(fields.outputs + comparison.measured.outputs, wanted, 1e-11)
    for parts in zip(
        comparison.predicted.conjugates, comparison.second_order.conjugates, comparison.by_flips.conjugates,
        comparison.measured.conjugates, strict=True,
    ):  # fmt: skip
        assert close(sum(parts[:3]), parts[3], 1e-11)
    if not sum(comparison.flips):
        assert close(comparison.held.outputs, comparison.measured.outputs, 1e-11)


def test_the_gradient_is_autograds():
    case = make([4, 6, 5, 3], outputs=2, n=5, bias=True)
    weights = [w.clone().requires_grad_() for w in case.weights]
    biases = [b.clone().requires_grad_() for b in case.biases]
    f = reference.outputs(weights, biases, case.slopes, case.readout, case.x)
    (f * case.residual).sum().backward()
    got_weights, got_biases = case.fields().gradients(case.residual)
    for got, wanted in zip([*got_weights, *got_biases], [*weights, *biases], strict=True):
        assert close(got, wanted.grad)


def test_one_layer_is_exact_until_a_mask_flips():
    case = make([4, 30], n=6, seed=3)
    fields = case.fields()
    small, large = fields.compare_step(case.residual, 1e-4), fields.compare_step(case.residual, 0.5)
    assert sum(small.flips) == 0
    assert close(small.measured.outputs, small.predicted.outputs)
    assert sum(large.flips) > 0
    assert close(large.held.outputs, large.predicted.outputs)
    assert float(large.by_flips.outputs.norm()) > 1e-3
    assert large.flips[0] == round(large.flip_fraction[0] * 6 * 30)
    assert "mask flips" in str(large)


def test_loss_decrease_of_a_prediction():
    case = make([4, 6, 5], outputs=2)
    step = case.fields().predict_step(case.residual, 0.1)
    assert close(-(step.outputs * case.residual).sum(), step.loss_decrease.sum())
    assert close(step.loss_decrease, 0.1 * case.fields().loss_decrease(case.residual))
    assert not bool(case.fields().predict_step(0 * case.residual, 0.1).loss_decrease.any())
    assert step.residual is step.outputs


# Trajectories ----------------------------------------------------------------------------------------------


def train(case, y, lr, steps):
    """Plain gradient descent on ½ Σ (f - y)², by autograd."""
    weights = [w.clone().requires_grad_() for w in case.weights]
    biases = [None if b is None else b.clone().requires_grad_() for b in case.biases]
    leaves = weights + [b for b in biases if b is not None]
    seen = []
    for _ in range(steps + 1):
        f = reference.outputs(weights, biases, case.slopes, case.readout, case.x)
        seen.append(f.detach())
        gradients = torch.autograd.grad(0.5 * (f - y).square().sum(), leaves)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf -= lr * gradient
    return torch.stack(seen)


def test_one_layer_trajectory_is_exact_with_flips():
    case = make([4, 20], outputs=2, n=6, bias=True, seed=5)
    y = torch.zeros(6, 2).double()
    found = predict_trajectory(case.fields(), y, 0.05, 60)
    assert close(found.measured, train(case, y, 0.05, 60), 1e-10)
    assert close(found.predicted, found.measured, 1e-10)
    flips = (case.fields().masks[1] != case.fields().take_step(case.fields().outputs - y, 0.5).masks[1]).sum()
    assert int(flips) > 0, "the case must have masks that flip, or it shows nothing"


def test_deep_trajectory_drifts_at_first_order_in_lr():
    """Over a fixed time, half the step makes half the drift."""
    case = make([4, 8, 6, 5], outputs=2, n=4, seed=1)
    y = torch.zeros(4, 2).double()
    coarse = predict_trajectory(case.fields(), y, 2e-4, 20)
    fine = predict_trajectory(case.fields(), y, 1e-4, 40)
    assert float(coarse.drift[-1]) > 1e-5
    assert float(coarse.drift[-1] / fine.drift[-1]) == pytest.approx(2.0, rel=0.1)
    assert float(coarse.field_drift[-1, 0]) == 0
    assert close(coarse.measured, train(case, y, 2e-4, 20), 1e-10)
    assert "drifted by" in str(coarse)


def test_field_drift_is_relative_like_the_drift_of_the_outputs():
    """Read out by the identity, the last field is the output, and its drift that of the output."""
    case = make([4, 8, 5], outputs=5, n=4, seed=1)
    case = replace(case, readout=torch.eye(5).double())
    found = predict_trajectory(case.fields(), torch.zeros(4, 5).double(), 0.01, 5)
    assert close(found.field_drift[:, -1], found.drift)
    assert float(found.drift[-1]) > 1e-4
    moved = (found.measured[-1] - found.measured[0]).norm()
    assert abs(float(moved) - 1) > 0.1, "with a change of size one, relative and absolute are the same"


def test_held_masks_lose_what_flips():
    case = make([4, 20], n=6, seed=5)
    y = torch.zeros(6, 1).double()
    held = predict_trajectory(case.fields(), y, 0.3, 30, masks="held")
    assert int(held.flips[-1].sum()) > 0
    assert float(held.drift[-1]) > 1e-3


def test_any_loss_by_its_residual():
    case = make([4, 8, 3], outputs=3, n=5, seed=2)
    labels = torch.tensor([0, 1, 2, 0, 1])

    def residual(f):
        return (f.softmax(1) - torch.nn.functional.one_hot(labels, 3)) / len(f)

    found = predict_trajectory(case.fields(), residual, 0.01, 5)
    assert float(found.drift[-1]) < 0.01


SEEDS = (0, 1, 5, 12, 23)  # the first two go on to the end


def test_field_equations_that_diverge_end_the_trajectory():
    """Narrow chains whose top layer dies: what was integrated until then is returned, and the step is named."""
    ended = 0
    for seed in SEEDS:
        case = make([4, 3, 3, 3, 3], n=6, seed=seed)
        fields, y = case.fields(), torch.randn(6, 1, generator=torch.Generator().manual_seed(seed)).double()
        top = float(torch.linalg.eigvalsh(sum(fields.kernels()).reshape(6, 6))[-1])
        found = predict_trajectory(fields, y, 0.1 / max(top, 1e-3), 400)
        count = len(found.drift) - 1
        assert torch.isfinite(found.predicted).all()
        assert torch.isfinite(found.drift).all()
        assert close(found.measured, train(case, y, 0.1 / max(top, 1e-3), count), 1e-8)
        assert bool(found.ended) == (count < 400)
        if found.ended:
            ended += 1
            assert f"the field equations diverged at step {count + 1}" in str(found)
            assert len(found.flips) == len(found.field_drift) == count + 1
    assert ended > 0, "the chains must be such that some diverge, or this shows nothing"


def test_gradient_descent_that_diverges_is_named_as_such():
    case = make([4, 8, 8, 3], outputs=2, n=4, slope=0.5, seed=1)  # leaky: the units cannot die
    found = predict_trajectory(case.fields(), torch.zeros(4, 2).double(), 50.0, 400)
    assert "gradient descent diverged at step" in found.ended
    assert torch.isfinite(found.measured).all()


def test_bad_input():
    fields = make([4, 8, 3]).fields()
    y = torch.zeros(4, 1).double()
    with pytest.raises(InputError, match="steps must be"):
        predict_trajectory(fields, y, 0.1, 0)
    with pytest.raises(InputError, match="y must have shape"):
        predict_trajectory(fields, y[:1], 0.1, 1)
    with pytest.raises(InputError, match="lr must be"):
        predict_trajectory(fields, y, -0.1, 1)
    with pytest.raises(InputError, match="masks must be one of 'follow', 'held'"):
        predict_trajectory(fields, y, 0.1, 1, masks="other")


def test_steps_show_themselves():
    w = [torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)]
    fields = gs.hierarchy.Fields(w, torch.randn(6, 3, dtype=torch.float64))
    comparison = fields.compare_step(fields.outputs, 0.1)
    assert repr(comparison.predicted).startswith("StepPrediction(total_decrease=")
    assert len(repr(comparison.predicted)) < 150
    drawn = comparison.plot().axes[0].lines[0]
    assert drawn.get_ydata().tolist() == comparison.measured.outputs.tolist()
    assert drawn.get_xdata().tolist() == comparison.predicted.outputs.tolist()
