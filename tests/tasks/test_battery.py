"""The battery of tasks in time: each trial solved again by hand from its inputs alone, and the common format."""

import math

import pytest
import torch

import gramscope as gs
from gramscope.base.errors import InputError

t = gs.tasks
FIVE = {"delayed_match": t.delayed_match, "go_anti": t.go_anti, "context_integration": t.context_integration,
        "interval_timing": t.interval_timing, "n_back": t.n_back}  # fmt: skip


@pytest.mark.parametrize("name", FIVE)
def test_seeds_decide_and_nothing_else_moves(name):
    state = torch.get_rng_state()
    a, b, c = FIVE[name](6, seed=3), FIVE[name](6, seed=3), FIVE[name](6, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert a.x.equal(b.x)
    assert not a.x.equal(c.x)
    assert len(a.x) == len(a.y) == len(a.mask) == 6
    assert float(a.loss(a.y)) == 0
    assert float(a.loss(a.y + 1)) == pytest.approx(1.0)
    noisy = FIVE[name](6, seed=3, noise=0.1)
    assert 0.05 < float((noisy.x - a.x).std()) < 0.2
    assert noisy.y.equal(a.y)


def test_delayed_match_is_decided_by_its_two_stimuli():
    task = t.delayed_match(20, seed=1, fixation=2, stimulus=3, delay=4, response=2)
    sample, test = task.x[:, 2, 1:], task.x[:, 9, 1:]
    assert float(task.x[:, 5:9, 1:].abs().max()) == 0
    assert float(task.x[:, 12:].abs().max()) == 0
    for a, b, answer in zip(sample, test, task.y[:, -1, 1], strict=True):
        cosine = float(a @ b)
        assert cosine > 1 - 1e-6 if answer > 0 else cosine < 1e-6
    assert task.y[:, -1, 1].sum() == 0
    assert task.y[:, :12].equal(torch.tensor([1.0, 0.0]).expand(20, 12, 2))
    assert float(task.y[:, 12:, 0].abs().max()) == 0


def test_go_and_anti():
    task = t.go_anti(10, seed=2, fixation=2, stimulus=3, response=2)
    for x, y in zip(task.x, task.y, strict=True):
        sign = {(1.0, 0.0): 1.0, (0.0, 1.0): -1.0}[tuple(x[0, 3:].tolist())]
        assert torch.allclose(y[-2:, 1:], sign * x[2:4, 1:3], atol=1e-6)
        assert float(x[:2, 1:3].abs().max()) == 0
        assert float(y[:5, 1:].abs().max()) == 0
    assert task.x[:, 0, 3].sum() == 5


def test_context_integration_needs_the_context():
    task = t.context_integration(40, seed=0, coherence=0.5, spread=0.3)
    streams, context = task.x[:, 5:35, 1:3].mean(1), task.x[:, 0, 3:]
    for stream, chosen, answer in zip(streams, context, task.y[:, -1, 1], strict=True):
        assert math.copysign(1.0, float(stream[int(chosen.argmax())])) == answer  # 30 draws: 9 standard errors
    conflict = streams.sign().prod(1) < 0
    assert 5 < int(conflict.sum()) < 35


def test_intervals_are_produced_again():
    task = t.interval_timing(30, seed=0, shortest=3, longest=7, wait=2)
    for x, y in zip(task.x[..., 0], task.y[..., 0], strict=True):
        ready, end = x.nonzero().flatten().tolist()
        interval = end - ready
        assert 3 <= interval <= 7
        wanted = [min(max((step - end) / interval, 0.0), 1.0) for step in range(len(x))]
        assert torch.allclose(y, torch.tensor(wanted))
        assert float(y[-1]) == 1.0


def test_n_back_against_a_loop():
    task = t.n_back(12, seed=0, back=3, symbols=3, items=8, hold=2)
    for x, y, mask in zip(task.x, task.y[..., 0], task.mask, strict=True):
        shown = x.argmax(1).tolist()
        for step in range(16):
            assert bool(mask[step]) == (step >= 6)
            if mask[step]:
                assert float(y[step]) == (1.0 if shown[step] == shown[step - 6] else -1.0)
    counted = task.y[task.mask]
    assert 0.3 < float((counted > 0).float().mean()) < 0.9


def test_a_battery_is_its_tasks():
    parts = {"timing": t.interval_timing(3, seed=1), "back": t.n_back(4, seed=2, symbols=6)}
    both = t.battery(parts)
    assert both.x.shape == (7, 51, 6 + 2)
    assert both.y.shape == (7, 51, 1)
    for place, (name, task) in enumerate(parts.items()):
        rows, length = both.groups[name], task.x.shape[1]
        assert both.x[rows, :length, : task.x.shape[2]].equal(task.x)
        assert both.x[rows, :, 6:].equal(torch.eye(2)[place].expand(len(rows), 51, 2))
        assert both.mask[rows, :length].equal(task.mask)
        assert not both.mask[rows, length:].any()
        outputs = torch.randn(both.y.shape, generator=torch.Generator().manual_seed(0))
        own = task.loss(outputs[rows, :length, : task.y.shape[2]])
        assert float(both.loss_of(name, outputs)) == pytest.approx(float(own), rel=1e-5)
    mean = sum(float(both.loss_of(name, outputs)) for name in parts) / 2
    assert float(both.loss(outputs)) == pytest.approx(mean, rel=1e-5)


def test_the_standard_battery_and_unused_channels():
    whole = t.battery(trials=2, seed=5)
    assert list(whole.groups) == list(FIVE)
    again, other = t.battery(trials=2, seed=5), t.battery(trials=2, seed=6)
    assert whole.x.equal(again.x)
    assert not whole.x.equal(other.x)
    wrong = whole.y.clone()
    wrong[~whole.used[:, None].expand_as(wrong)] = 9.0  # channels that a task does not have
    wrong[~whole.mask] = 9.0
    assert float(whole.loss(wrong)) == 0.0
    assert set(t.battery(("parity", "flip_flop", "memory_pro", "line_attractor"), trials=1).groups) == {
        "parity", "flip_flop", "memory_pro", "line_attractor"
    }  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        lambda: t.delayed_match(0),
        lambda: t.go_anti(response=0),
        lambda: t.context_integration(coherence=0.0),
        lambda: t.context_integration(spread=-1.0),
        lambda: t.interval_timing(shortest=5, longest=4),
        lambda: t.n_back(back=3, items=3),
        lambda: t.n_back(symbols=1),
        lambda: t.n_back(noise=-1.0),
        lambda: t.battery(("go_anti", "go_anti")),
        lambda: t.battery(("chess",)),
        lambda: t.battery({}),
        lambda: t.battery(("n_back",), 1).loss_of("go_anti", torch.zeros(1, 50, 1)),
        lambda: t.battery(("n_back",), 1).loss_of("n_back", torch.zeros(1, 49, 1)),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises((InputError, ValueError), match=r"must|there is no task"):
        call()
