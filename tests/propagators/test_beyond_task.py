"""Collapse over and above the task, blocked components and ranks against bounds: all against dense matrices."""

import jaxtyping
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.propagators import (
    GlobalNTK,
    blocked_components,
    collapse_beyond_task,
    kernel_rank,
)
from references.jacobian import reference_jacobian
from references.propagators import recurrent_states, stacked_jacobian


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def case():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.GRU(2, 3, batch_first=True).double()
        return model, torch.randn(3, 5, 2, dtype=torch.float64), torch.randn(3, 5, 1, dtype=torch.float64)


def ratio(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return float(values.sum() ** 2 / values.square().sum())


def traced(J, keep):
    """``Σ_i A_{(i,a),(i,b)}`` from the Jacobian, in loops over what is traced out."""
    parts = J.reshape(3, 5, 3, -1)
    if keep == ["time"]:
        return sum(parts[b, :, u] @ parts[b, :, u].mT for b in range(3) for u in range(3))
    if keep == ["trial"]:
        return sum(parts[:, t, u] @ parts[:, t, u].mT for t in range(5) for u in range(3))
    return sum(parts[:, :, u].flatten(0, 1) @ parts[:, :, u].flatten(0, 1).mT for u in range(3))


def over(keep):
    return [name for name in ("trial", "time", "site", "unit") if name not in keep]


def signals(z, keep):
    axis = {"time": 1, "trial": 0}
    flat = z.flatten(0, 1).flatten(1) if len(keep) == 2 else z.movedim(axis[keep[0]], 0).flatten(1)
    return flat @ flat.mT


@pytest.mark.parametrize("keep", [["time"], ["trial"], ["trial", "time"]])
def test_every_ratio_against_dense_matrices(case, keep):
    model, x, y = case
    found = collapse_beyond_task(model, x, y, over=over(keep))
    states = recurrent_states(model, x)
    J = stacked_jacobian(states, list(model.parameters())).detach()
    g = GlobalNTK(model, x)
    assert found.kernel == pytest.approx(ratio(traced(J, keep)), rel=1e-10)
    assert found.parameters == pytest.approx(ratio(traced(g.P_inverse.dense() @ J, keep)), rel=1e-10)
    assert found.propagator == pytest.approx(ratio(traced(g.P.dense(), keep)), rel=1e-10)
    assert found.states == pytest.approx(ratio(signals(states.detach(), keep)), rel=1e-10)
    grams = [signals(z, keep) for z in (x, y)]
    assert found.inputs == pytest.approx(ratio(grams[0]), rel=1e-10)
    assert found.targets == pytest.approx(ratio(grams[1]), rel=1e-10)
    assert found.task == pytest.approx(ratio(sum(gram / gram.trace() for gram in grams)), rel=1e-10)
    assert found.kernel_error == 0
    alone = collapse_beyond_task(model, x, over=over(keep))
    assert alone.targets is None
    assert alone.task == pytest.approx(found.inputs)


def test_random_vectors_estimate_it(case):
    model, x, y = case
    exact, sampled = collapse_beyond_task(model, x, y), collapse_beyond_task(model, x, y, products=200, seed=1)
    assert abs(sampled.kernel - exact.kernel) < 4 * sampled.kernel_error
    assert abs(sampled.noise_kernel - collapse_beyond_task(model, x, y, seed=1).noise_kernel) < (
        4 * sampled.noise_kernel_error
    )
    assert sampled.kernel_error < 0.2 * exact.kernel
    assert sampled.propagator == pytest.approx(exact.propagator, rel=0.2)
    assert sampled.kernel == collapse_beyond_task(model, x, y, products=200, seed=1).kernel


def test_a_network_without_memory_has_the_ranks_of_its_inputs():
    """W_hh = 0 and linear units: NTK_S over time is n_out times the Gram matrix of the inputs, noise or not."""
    model = nn.RNN(2, 4, batch_first=True, bias=False, nonlinearity="relu").double()
    with torch.no_grad():
        model.weight_hh_l0.zero_()
        model.weight_ih_l0.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]))
    model.weight_hh_l0.requires_grad_(False)
    x = torch.rand(3, 6, 2, dtype=torch.float64) + 0.1  # all units on
    found = collapse_beyond_task(model, x)
    assert found.kernel == pytest.approx(found.inputs, rel=1e-10)
    assert found.ratio == pytest.approx(1.0, rel=1e-10)


def test_a_recurrent_network_collapses_under_noise_too():
    task = gs.tasks.memory_pro(4, fixation=3, stimulus=4, delay=5, response=4)
    torch.manual_seed(0)
    found = collapse_beyond_task(nn.RNN(3, 32, batch_first=True), task.x, task.y, products=4)
    assert found.noise_ratio < 0.5
    assert found.propagator > 3 * found.kernel


def test_components_and_their_quotients(case):
    task = gs.tasks.go_anti(3, seed=0, fixation=1, stimulus=2, response=2)
    task.mask[:, 0] = False
    model = gs.tasks.recurrent("rnn", 5, 4, 3, seed=2).double()
    found = blocked_components(model, task, products=300)
    jacobian = torch.cat([j.flatten(2) for j in reference_jacobian(model, task.x.double()).values()], dim=2).flatten(
        0, 1
    )
    kernel = jacobian @ jacobian.mT
    y = (task.y * task.mask[..., None]).double().flatten(0, 1)
    values, vectors = torch.linalg.eigh(y.mT @ y)
    for j, (value, v) in enumerate(zip(values.flip(0), vectors.mT.flip(0), strict=True)):
        m = torch.outer(y @ v, v).flatten() / value.sqrt()
        assert found.share[j] == pytest.approx(float(value / values.sum()), rel=1e-10)
        assert found.quotient[j] == pytest.approx(float(m @ kernel @ m), rel=1e-10)
    counted = task.mask[:, :, None].expand_as(task.y).flatten()
    mean = float(kernel.diagonal()[counted].mean())
    assert abs(found.mean - mean) < 4 * found.mean_error < 0.5 * mean
    assert found.relative.allclose(found.quotient / found.mean)
    assert found.blocked_share == pytest.approx(float(found.share[found.relative < 1].sum()))
    assert len(blocked_components(model, task, 2).share) == 2


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("tokens", [2, 8])
def test_the_kernel_of_self_attention_against_its_bound(tokens):
    """Beyond d + 1 tokens in all, more of them add states, and no rank: the bound is 4 d (d + 1)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = SelfAttention(4, 2, batch_first=True).double(), torch.randn(2, tokens, 4, dtype=torch.float64)
    g = GlobalNTK(model, x)
    found = kernel_rank(g)
    dense = g.operator.dense()
    values = torch.linalg.eigvalsh(dense)
    assert found.rank == int((values > 1e-12 * values[-1]).sum()) <= found.bound <= found.size == 32 * tokens
    assert found.bound == 16 * min(2 * tokens, 5)
    assert found.participation_ratio == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-10)
    assert found.tightness == found.rank / found.bound


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m, x: collapse_beyond_task(m, x, over=["unit"]), "over must name"),
        (lambda m, x: collapse_beyond_task(m, x, x[:, :2]), "like x"),
        (lambda m, x: collapse_beyond_task(nn.Linear(2, 2).double(), x), "recurrent module or a cell"),
        (lambda m, x: collapse_beyond_task(nn.RNN(2, 2).double(), x), "batch_first"),
        (lambda m, x: collapse_beyond_task(m, x.repeat(2, 400, 1)), "products=8"),
        (lambda m, x: collapse_beyond_task(m, x, products=2), "products must be"),
        (lambda m, x: blocked_components(m, gs.tasks.SequenceTask(x, x, torch.ones(3, 5).bool())), "outputs like"),
        (lambda m, x: blocked_components(m, gs.tasks.SequenceTask(x, 0 * x, torch.ones(3, 5).bool())), "all zero"),
        (lambda m, x: kernel_rank(GlobalNTK(m, x.repeat(40, 3, 1))), "whole Jacobian"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained(case, call, match):
    with pytest.raises(InputError, match=match):
        call(*case[:2])
