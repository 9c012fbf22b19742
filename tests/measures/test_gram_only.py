"""GramOnly: hooks by which an optimiser takes one part of its steps."""

import copy
import io
import math

import jaxtyping
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.measures.gram_only import GramOnly, gram_only_step, split_step
from gramscope.measures.gram_tracker import GramTracker
from gramscope.measures.weight_matrices import weight_forms
from gramscope.tasks import digits


@pytest.fixture
def as_users_run_it():
    # Under pytest every annotation is checked, and a wrong type never gets as far as our own message.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def network(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4).eval(), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.ReLU(),
        nn.Linear(6, 2),
    ).to(dtype)  # fmt: skip


def batch(dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    return torch.randn(8, 2, 4, 4).to(dtype), torch.randn(8, 2).to(dtype)


def backward(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def part_of(optimizer, **options):
    """The optimiser itself, of whose steps one part is taken."""
    GramOnly(optimizer, **options)
    return optimizer


def grams(model):
    parameters = dict(model.named_parameters())
    found = {}
    for name, use in weight_forms(model).items():
        matrices = use.form.matrices(parameters[name])
        found[name] = matrices.mT @ matrices
    return found


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("keep", ["altering", "preserving"])
def test_gram_matrices_are_those_of_the_full_step_or_of_none(name, keep):
    """The full step from the same point and state gives the Gram matrices to reach; 1e-10 asked, rounding reached."""
    model = network()
    optimizer = OPTIMISERS[name](model.parameters())
    part = GramOnly(optimizer, keep=keep, model=model)
    x, y = batch()
    for _ in range(4):
        before = grams(model)
        backward(model, optimizer, x, y)
        free = copy.deepcopy((model, optimizer))  # which leaves hooks out
        for mine, theirs in zip(model.parameters(), free[0].parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        optimizer.step()
        free[1].step()
        goal = grams(free[0]) if keep == "altering" else before
        for key, gram in grams(model).items():
            assert float((gram - goal[key]).norm()) <= 1e-13 * float(goal[key].norm())
        for bias in ("0.bias", "1.weight", "4.bias", "6.bias"):
            assert torch.equal(model.get_parameter(bias), free[0].get_parameter(bias))
    assert part.plan["0.weight (4x1x3x3)"] == f"{keep} part"
    assert part.plan["1.weight (4)"] == "full step, no matrix"
    part.remove()
    backward(model, optimizer, x, y)
    free = copy.deepcopy((model, optimizer))
    for mine, theirs in zip(model.parameters(), free[0].parameters(), strict=True):
        theirs.grad = mine.grad.clone()
    optimizer.step()
    free[1].step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), free[0].parameters(), strict=True)), "whole again"


@pytest.mark.parametrize("keep", ["altering", "preserving"])
@pytest.mark.parametrize("method", ["procrustes", "sylvester"])
def test_against_the_parts_by_hand(keep, method):
    model = nn.Linear(5, 3, bias=False).double()
    optimizer = part_of(torch.optim.SGD(model.parameters(), lr=0.1), keep=keep, method=method)
    old = model.weight.detach().clone()
    backward(model, optimizer, torch.randn(4, 5).double(), torch.randn(4, 3).double())
    full = old - 0.1 * model.weight.grad
    optimizer.step()
    if method == "procrustes":
        expected = gram_only_step(old, full, keep)
    else:
        expected = old + getattr(split_step(old, full - old), keep)
    assert torch.allclose(model.weight.detach(), expected, atol=1e-14)
    assert not torch.allclose(model.weight.detach(), full, atol=1e-6)


def test_freezing_what_is_no_matrix():
    model = network()
    biases = [model[0].bias.detach().clone(), model[4].bias.detach().clone()]
    optimizer = OPTIMISERS["adam"](model.parameters())
    part = GramOnly(optimizer, others="freeze", model=model)
    backward(model, optimizer, *batch())
    old = model[4].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[4].bias, biases[1])
    assert not torch.equal(model[4].weight, old)
    assert "no step" in str(part)


def test_a_model_tells_embeddings_and_transposed_layers_from_plain_matrices():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "up": nn.ConvTranspose1d(4, 2, 3, groups=2)})
    plan = GramOnly(torch.optim.SGD(model.parameters(), lr=0.1), model=model).plan
    assert plan["embed.weight (7x3)"] == "full step, no matrix"
    assert plan["up.weight (4x1x3)"] == "altering part"
    plan = GramOnly(torch.optim.SGD(model.parameters(), lr=0.1)).plan
    assert plan["group 0, parameter 0 (7x3)"] == "altering part"


def test_groups_schedulers_and_added_groups():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[4].parameters()}]
    optimizer = part_of(torch.optim.SGD(groups, lr=0.1), model=model)
    for make in (
        lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
    ):
        scheduler = make(optimizer)
        backward(model, optimizer, *batch())
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    optimizer.add_param_group({"params": list(model[6].parameters()), "lr": 0.0})
    assert len(optimizer.param_groups) == 3
    last = model[6].weight.detach().clone()
    backward(model, optimizer, *batch())
    optimizer.step()
    assert torch.equal(model[6].weight, last)  # a rate of zero moves nothing, to the last bit


def test_state_dict_goes_both_ways_and_training_resumes_exactly():
    model = network()
    optimizer = part_of(OPTIMISERS["adam"](model.parameters()), model=model)
    x, y = batch()
    for _ in range(3):
        backward(model, optimizer, x, y)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other = network(seed=5)
    other.load_state_dict(saved["model"])
    resumed = part_of(OPTIMISERS["adam"](other.parameters()), model=other)
    resumed.load_state_dict(saved["optimizer"])
    for m, o in ((model, optimizer), (other, resumed)):
        backward(m, o, x, y)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_closures_and_lbfgs():
    model = network()
    optimizer = part_of(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), keep="preserving", model=model)
    x, y = batch()
    before = grams(model)
    loss = optimizer.step(lambda: backward(model, optimizer, x, y))
    assert float(loss.detach()) > 0
    assert all(float((gram - before[name]).norm()) < 1e-12 for name, gram in grams(model).items())
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), network().parameters(), strict=True))


def test_grad_scaler_unscales_and_skips_infinite_steps():
    for fused in (False, True):
        model, plain = network(dtype=torch.float32), network(dtype=torch.float32)
        optimizer = part_of(torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), model=model)
        reference = part_of(torch.optim.AdamW(plain.parameters(), lr=0.01), model=plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batch(torch.float32)
        for clip in (False, True):
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            backward(plain, reference, x, y)
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            reference.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        held = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(held, model.parameters(), strict=True))


def test_several_optimisers_each_with_its_own_part():
    model = network()
    first = part_of(torch.optim.SGD(model[0].parameters(), lr=0.1), keep="preserving", model=model)
    second = part_of(torch.optim.Adam(model[4].parameters(), lr=0.01), keep="altering", model=model)
    before = grams(model)
    x, y = batch()
    (model(x) - y).square().mean().backward()
    first.step()
    second.step()
    after = grams(model)
    assert float((after["0.weight"] - before["0.weight"]).norm()) < 1e-14
    assert float((after["4.weight"] - before["4.weight"]).norm()) > 1e-4
    assert torch.equal(after["6.weight"], before["6.weight"])


def test_hooks_and_the_tracker_see_the_step_really_taken():
    model = network()
    optimizer = part_of(torch.optim.SGD(model.parameters(), lr=0.1), keep="preserving", model=model)
    with GramTracker(model, optimizer) as tracker:
        backward(model, optimizer, *batch())
        optimizer.step()
    change = tracker.compute()["4.weight"]
    assert change.steps == 1
    assert float(change.gram.norm()) < 1e-13
    assert float(change.virtual.norm()) > 1e-6  # -DᵀD: a turn of finite size is no step along the tangent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_round_once(dtype):
    layer = nn.Linear(6, 4, bias=False).to(dtype)
    old = layer.weight.detach().clone()
    optimizer = part_of(torch.optim.SGD(layer.parameters(), lr=0.5))
    layer(torch.randn(3, 6).to(dtype)).square().sum().backward()
    full = (old - 0.5 * layer.weight.grad).detach()
    optimizer.step()
    expected = gram_only_step(old, full)
    assert layer.weight.dtype == dtype
    assert float((layer.weight.detach().double() - expected).norm() / expected.norm()) < 2 * torch.finfo(dtype).eps


def test_unused_zero_and_frozen_parameters_stay_to_the_last_bit():
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = part_of(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    held = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # no gradients yet
    (model(batch()[0]) * 0).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(held, model.parameters(), strict=True))


def test_refusals():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="real"):
        GramOnly(torch.optim.SGD([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], lr=1))
    optimizer = part_of(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full((2, 2), math.nan)
    with pytest.raises(InputError, match="diverged"):
        optimizer.step()


def test_options_are_checked(as_users_run_it):
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="Optimizer"):
        GramOnly(nn.Linear(2, 2))
    with pytest.raises(InputError, match="keep"):
        GramOnly(torch.optim.SGD([weight], lr=1.0), keep="both")


def test_networks_learn_through_their_gram_matrices():
    """The theory's comparison on scikit-learn's digits: the altering part learns nearly as well as all, the other not.

    Measured: full .92, altering .90, preserving .71 test accuracy.
    """
    task = digits()
    accuracies = {}
    for part in ("full", "altering", "preserving"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.85)
        if part != "full":
            GramOnly(optimizer, keep=part, model=model, others="freeze")
        order = torch.Generator().manual_seed(0)
        for _ in range(4):
            for rows in torch.randperm(len(task.x), generator=order).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(task.x[rows]), task.y[rows]).backward()
                optimizer.step()
        accuracies[part] = float((model(task.x_test).argmax(1) == task.y_test).float().mean())
    assert accuracies["altering"] > accuracies["full"] - 0.05
    assert accuracies["preserving"] < accuracies["altering"] - 0.1
