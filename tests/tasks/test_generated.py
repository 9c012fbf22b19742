"""Generated tasks: what they promise, their seeds, and that a global random stream is left alone."""

import pytest
import torch

from gramscope.tasks.modular_arithmetic import modular, modular_transformer
from gramscope.tasks.sequences import flip_flop, line_attractor, memory_pro, parity
from gramscope.tasks.synthetic import swiss_roll

SEQUENCES = {"memory_pro": memory_pro, "flip_flop": flip_flop, "line_attractor": line_attractor, "parity": parity}


@pytest.mark.parametrize("name", SEQUENCES)
def test_seeds_decide_and_nothing_else_moves(name):
    state = torch.get_rng_state()
    a, b, c = SEQUENCES[name](6, seed=3), SEQUENCES[name](6, seed=3), SEQUENCES[name](6, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.x, b.x)
    assert not torch.equal(a.x, c.x)
    assert len(a.x) == len(a.y) == len(a.mask) == 6
    assert float(a.loss(a.y)) == 0
    assert float(a.loss(a.y + 1)) == pytest.approx(1.0)


def test_memory_pro_hides_the_direction_during_the_delay():
    task = memory_pro(8, fixation=2, stimulus=3, delay=4, response=2)
    assert float(task.x[:, 5:, 1:].abs().max()) == 0
    assert torch.equal(task.y[:, -1, 1:], task.x[:, 2, 1:])
    assert torch.allclose(task.y[:, -1, 1:].norm(dim=1), torch.ones(8))
    assert float(task.x[:, -2:, 0].abs().max()) == 0
    assert float(memory_pro(8, noise=0.1).x[:, -1].abs().min()) > 0


def test_flip_flop_holds_the_last_pulse():
    task = flip_flop(4, steps=30, bits=2, seed=1)
    held = torch.zeros(4, 2)
    for t in range(30):
        held = torch.where(task.x[:, t] != 0, task.x[:, t], held)
        assert torch.equal(task.y[:, t], held)


def test_parity_counts_only_the_last_step_when_asked():
    task = parity(4, steps=5, every_step=False)
    assert task.mask.sum() == 4
    wrong = task.y.clone()
    wrong[:, :-1] = 7.0
    assert float(task.loss(wrong)) == 0


def test_modular_splits_all_pairs():
    task = modular(7, train=0.4, operation="multiply", seed=2)
    pairs = torch.cat([task.x, task.x_test])
    assert len(torch.unique(pairs, dim=0)) == 49
    assert bool((torch.cat([task.y, task.y_test]) == pairs[:, 0] * pairs[:, 1] % 7).all())
    state = torch.get_rng_state()
    model, same = modular_transformer(task), modular_transformer(task)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(task.x), same(task.x))


def test_modular_can_be_learnt():
    task = modular(5, train=0.8)
    model = modular_transformer(task, seed=1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(task.x), task.y).backward()
        optimiser.step()
    assert float((model(task.x).argmax(1) == task.y).float().mean()) > 0.95


@pytest.mark.parametrize(
    "call",
    [
        lambda: memory_pro(0),
        lambda: memory_pro(delay=-1),
        lambda: memory_pro(fixation=-2),
        lambda: swiss_roll(1),
        lambda: flip_flop(rate=2.0),
        lambda: flip_flop(bits=0),
        lambda: line_attractor(steps=0),
        lambda: parity(trials=-1),
        lambda: modular(1),
        lambda: modular(5, train=1.0),
        lambda: modular(5, operation="divide"),
    ],
)
def test_bad_sizes_are_refused(call):
    with pytest.raises(ValueError, match=r"must"):
        call()
