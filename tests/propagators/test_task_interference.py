"""Interference of tasks against gradients by autograd and against dense blocks."""

import jaxtyping
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.propagators import GlobalNTK, interference, task_interference
from references.propagators import stacked_jacobian


@pytest.fixture(scope="module")
def case():
    parts = {
        "go": gs.tasks.go_anti(2, seed=0, fixation=1, stimulus=2, response=1),
        "back": gs.tasks.n_back(2, seed=1, back=1, symbols=2, items=3, hold=1),
        "timing": gs.tasks.interval_timing(1, seed=2, shortest=1, longest=1, wait=0),
    }
    task = gs.tasks.battery(parts)
    model = gs.tasks.recurrent("rnn", task.x.shape[2], 4, task.y.shape[2], seed=1).double()
    return model, task


@pytest.fixture(scope="module")
def exact(case):
    return task_interference(*case, products=None)


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_effects_are_inner_products_of_gradients(case, exact):
    (model, task), found = case, exact
    f = model(task.x.double())
    grads = [torch.autograd.grad(task.loss_of(n, f), list(model.parameters()), retain_graph=True) for n in task.groups]
    flat = torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])
    assert torch.allclose(found.effects, flat @ flat.mT, rtol=1e-10, atol=1e-14)
    norms = flat.norm(dim=1)
    assert torch.allclose(found.cosines, flat @ flat.mT / torch.outer(norms, norms), atol=1e-10)
    for place, name in enumerate(dict(model.named_parameters())):
        rows = torch.stack([row[place].flatten() for row in grads])
        assert torch.allclose(found.parts[name], rows @ rows.mT, rtol=1e-10, atol=1e-14)


def test_a_small_step_does_what_the_effects_say(case, exact):
    (model, task), found, lr = case, exact, 1e-5
    moved = gs.tasks.recurrent("rnn", task.x.shape[2], 4, task.y.shape[2], seed=1).double()
    before = model(task.x.double()).detach()
    task.loss_of("back", moved(task.x.double())).backward()
    with torch.no_grad():
        for p in moved.parameters():
            p -= lr * p.grad
    after = moved(task.x.double()).detach()
    for a, name in enumerate(found.names):
        change = float(task.loss_of(name, after) - task.loss_of(name, before))
        assert change == pytest.approx(-lr * float(found.effects[a, 1]), rel=1e-3, abs=1e-10)


def test_reach_against_dense_blocks(case, exact):
    model, task = case
    g = GlobalNTK(model, task.x.double())
    J = g.jacobian.dense().reshape(len(task.x), -1, sum(p.numel() for p in model.parameters()))
    blocks = [J[rows].flatten(0, 1) for rows in task.groups.values()]
    norms = torch.stack([torch.stack([(a @ b.mT).norm() for b in blocks]) for a in blocks])
    wanted = norms / (norms.diagonal()[:, None] * norms.diagonal()).sqrt()
    assert torch.allclose(exact.reach, wanted, atol=1e-12)
    sampled = task_interference(model, task, products=200, seed=1)
    assert bool(((sampled.reach - wanted).abs() <= 4 * sampled.reach_error + 1e-12).all())
    assert 0 < float(sampled.reach_error.max()) < 0.1
    assert sampled.reach.equal(task_interference(model, task, products=200, seed=1).reach)
    assert sampled.reach.equal(sampled.reach.mT)
    assert torch.allclose(interference(g.operator, task.groups)[1], wanted, atol=1e-12)


def test_stacked_gradients_are_those_of_the_states(case):
    """The same numbers from all states and their adjoints: ``g_aᵀ (P J)(P J)* g_b``."""
    model, task = case
    x = task.x.double()
    hidden, _ = model.cell(x)
    J = stacked_jacobian(model.readout(hidden), list(model.parameters())).detach()
    f = model(x)
    slopes = [torch.autograd.grad(task.loss_of(n, f), f, retain_graph=True)[0].flatten() for n in task.groups]
    Q = torch.stack(slopes, dim=1)
    assert torch.allclose(task_interference(model, task, products=3).effects, Q.mT @ J @ J.mT @ Q, rtol=1e-10)


class Mixing(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.w = nn.Linear(i, o)

    def forward(self, x):
        return self.w(x - x.mean(0))


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained(case):
    model, task = case
    with pytest.raises(InputError, match="TaskBattery"):
        task_interference(model, gs.tasks.n_back(2))
    with pytest.raises(InputError, match="outputs like the targets"):
        task_interference(model.cell, task)
    with pytest.raises(InputError, match="mixes them"):
        task_interference(Mixing(task.x.shape[2], task.y.shape[2]), task)
    with pytest.raises(InputError, match="products must be"):
        task_interference(model, task, products=1)


def test_cosines_are_a_table():
    cosines = torch.tensor([[1.0, 0.25], [0.5, 1.0]], dtype=torch.float64)
    one = torch.eye(2, dtype=torch.float64)
    found = gs.propagators.TaskInterference(("a", "b"), one, {}, cosines, one, 0 * one)
    assert found.to_dataframe().loc["a", "b"] == 0.25  # row: moved, column: learnt
    assert "<td>0.25</td>" in found._repr_html_()
