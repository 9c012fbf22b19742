"""Turns by a clock that only goes when it is told to: who is read how often, and what it costs in all."""

import itertools
import time

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import READERS, Reader, Reading, moment
from gramscope.record.budget import Budget
from gramscope.record.moment import Moment

X, Y = torch.randn(6, 4), torch.randint(0, 2, (6,))
SHARE, STEP = 0.05, 0.02


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(Budget, "clock", made)
    return made


@pytest.fixture
def register(monkeypatch, clock):
    """Adds a measure that takes so many seconds, the first time more; the steps at which it was read."""

    def add(name, warm, cold=None, guess=None):
        read = []

        def take(moment):
            clock.now += warm if read or cold is None else cold
            read.append(moment.step)
            return Reading({f"{name}/value": 1.0})

        foretold = None if guess is None else (lambda subject, capture: guess)
        monkeypatch.setitem(READERS, name, Reader(name, take, False, "", True, foretold))
        return read

    return add


def train(scope, clock, seconds):
    """Steps of a fiftieth second; the most that was charged for each second of training so far."""
    worst, budget = 0.0, scope.budget
    while clock.now < seconds:
        clock.now += STEP
        scope.step()
        worst = max(worst, (budget.spent - budget.uncharged) / budget.training_time)
    return worst


def test_all_come_round_again_after_a_cold_start(clock, register):
    """A first reading a hundred times as dear as the others, and a rehearsal that nobody has timed."""
    reads = {
        "loss": register("loss", 2e-3, cold=0.234),
        "norm": register("norm", 1e-4, cold=0.01),
        "spectra": register("spectra", 3e-3, cold=0.05, guess=0.06),
        "step": register("step", 0.012, cold=0.1, guess=0.1),
    }
    scope = gs.watch(nn.Linear(4, 2), (X, Y), every=1, measures=list(reads), overhead=SHARE)
    worst = train(scope, clock, 40)
    assert worst <= SHARE
    assert scope.overhead > 0.5 * SHARE, "there was time that nobody was given"
    assert all(len(steps) > 12 for steps in reads.values()), {name: len(steps) for name, steps in reads.items()}
    for steps in reads.values():
        late = [step for step in steps if step > 700]
        assert max(b - a for a, b in itertools.pairwise(late)) < 300, "each comes round every few seconds"


def test_a_dear_measure_takes_its_part_and_no_more(clock, register):
    cheap, dear = register("cheap", 1e-3), register("dear", 1.0, guess=1.0)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures=["cheap", "dear"], overhead=SHARE)
    assert train(scope, clock, 80) <= SHARE
    assert 1 <= len(dear) <= 2
    assert len(cheap) > 500
    gaps = [b - a for a, b in itertools.pairwise(cheap)]
    assert max(gaps) < 50, "what is saved up for the dear one is not taken from the cheap one's part"


def test_a_dear_measure_without_a_guess_does_not_hold_up_the_others(clock, register):
    cheap, dear = register("cheap", 1e-3), register("dear", 0.5)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures=["cheap", "dear"], overhead=SHARE)
    assert train(scope, clock, 60) <= SHARE
    assert len(dear) >= 2
    assert len(cheap) > 20 * len(dear)


def test_one_disturbed_reading_is_forgotten(clock, register):
    reads = register("plain", 2e-3)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures="plain", overhead=SHARE)
    train(scope, clock, 5)
    scope.budget.note("plain", 5.0)  # the machine slept
    scope.budget.spent -= 5.0
    before = len(reads)
    train(scope, clock, 10)
    assert len(reads) > before + 50


def test_a_capture_is_nobodys_own_cost(monkeypatch):
    real = moment.capture
    monkeypatch.setattr(moment, "capture", lambda *a, **k: time.sleep(0.5) or real(*a, **k))
    scope = gs.watch(nn.Linear(4, 2), (X, Y), measures=["loss", "norm"], overhead=None)
    assert scope.budget.costs["capture"] >= 0.5 > scope.budget.costs["loss"]
    assert scope._turns.capturing == {"loss"}


def test_refusals_cost_next_to_nothing_and_are_not_written(clock, register, monkeypatch):
    register("plain", 0.5)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures="plain", overhead=SHARE)
    split = scope._turns.split
    calls = []
    monkeypatch.setattr(scope._turns, "split", lambda subject: calls.append(1) or split(subject))
    train(scope, clock, 20)
    assert len(calls) < 0.1 * scope.count
    assert len(scope.records) < 4
    assert all("plain/value" in record["scalars"] for record in scope.records)


def test_what_is_logged_is_kept_when_nothing_can_be_read(tmp_path, clock, register):
    register("plain", 2.0)
    with gs.watch(nn.Linear(4, 2), X, tmp_path / "a", every=1, measures="plain", overhead=SHARE) as scope:
        for step in range(1, 5001):
            clock.now += STEP
            scope.step(loss=1.0 / step, lr=0.1)
        run = gs.open_run(tmp_path / "a")
        assert len(run.logged()["loss"]) > 4900, "all but those of the last second are on the disk while it trains"
    expected = {step: 1.0 / step for step in range(1, 5001)}
    assert scope.logged["loss"] == expected
    run.refresh()
    assert run.logged()["loss"].to_dict() == expected
    assert run.logged()["lr"].to_dict() == dict.fromkeys(expected, 0.1)
    assert len(run.steps) < 5


def test_the_first_measurement_is_not_charged(clock, register):
    """Imports and warm-up are no cost of measuring; nor may they hide from who asks what was paid."""
    reads = register("plain", 0.01, cold=5.0)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures="plain", overhead=SHARE)
    assert scope.budget.room == pytest.approx(0.0)
    while not reads[1:]:
        clock.now += STEP
        scope.step()
    # Room for a second measurement as expensive as the first, which is all that is known of it.
    assert clock.now - 5.0 == pytest.approx(5.0 / (0.6 * SHARE), rel=0.05)
    assert scope.overhead > SHARE / 2, "the first one too"


def test_what_was_paid_stands_still_after_the_end(clock, register):
    register("plain", 0.01)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures="plain", overhead=None)
    for _ in range(10):
        clock.now += STEP
        scope.step()
    before = scope.overhead
    scope.close()
    assert scope.overhead == pytest.approx(before)
    clock.now += 1000.0
    assert scope.overhead == pytest.approx(before)
    assert before == pytest.approx(0.11 / 0.2)


def test_counting_does_not_use_up_the_budget(clock, register, monkeypatch):
    """A loop of 4,000 steps a second whose every step costs the watch some microseconds: measures still come round."""
    reads = {"plain": register("plain", 0.01), "dear": register("dear", 0.02, guess=0.02)}
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures=list(reads), overhead=SHARE)
    steps, asked, due = 40_000, [], scope._due

    def timed(step):
        clock.now += 12e-6
        asked.append(step)
        return due(step)

    monkeypatch.setattr(scope, "_due", timed)
    for _ in range(steps):
        clock.now += 1 / 4000
        scope.step(loss=1.0)
    assert scope.count == steps
    assert len(asked) < 0.1 * steps, "most steps are neither timed nor looked up"
    assert all(len(found) > 4 for found in reads.values()), reads
    assert max(b - a for found in reads.values() for a, b in itertools.pairwise(found)) < 0.4 * steps
    assert all({"plain/value", "dear/value"} & set(record["scalars"]) for record in scope.records)
    assert list(scope.logged["loss"]) == list(range(1, steps + 1))
    assert scope.overhead < SHARE


def test_a_loop_that_becomes_slower_is_soon_asked_again(clock, register):
    """Steps are skipped unasked only as far as their speed foretells that they would be refused."""
    reads = register("plain", 0.01)
    scope = gs.watch(nn.Linear(4, 2), X, every=1, measures="plain", overhead=SHARE)
    for seconds, steps in ((1e-4, 20_000), (1.0, 40)):
        before = len(reads)
        for _ in range(steps):
            clock.now += seconds
            scope.step()
    assert len(reads) - before > 5


def test_a_resumed_run_has_not_paid_for_the_steps_before(tmp_path, clock, register):
    register("plain", 0.0)
    with gs.watch(nn.Linear(4, 2), X, tmp_path / "a", every=1, measures="plain") as scope:
        scope.step()
    scope = gs.watch(nn.Linear(4, 2), X, tmp_path / "a", every=1, measures="plain", resume=1_000_000)
    due = scope._due
    scope._due = lambda step: setattr(clock, "now", clock.now + 1e-5) or due(step)
    scope.step()
    assert scope.budget.spent < 1e-3


def test_a_rehearsal_without_an_optimiser_is_not_taken_for_cheap():
    model = nn.Linear(4, 2)
    scope = gs.watch(model, (X, Y), measures=["step", "norm"], every=1, overhead=None)
    assert "step" not in scope.budget.costs
    scope.use(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert "step/error" in scope.records[-1]["scalars"]


@pytest.mark.parametrize("wrong", [0, 1, -0.1, "a", True, [0.1], float("nan")])
def test_the_share_is_a_fraction(wrong):
    with pytest.raises(InputError, match="overhead must be a fraction"):
        Budget(wrong)


def test_the_moment_notes_what_its_capture_took(clock):
    scope = gs.watch(nn.Linear(4, 2), (X, Y), measures="norm", overhead=None)
    moment = Moment(scope.subject, 0)
    assert not moment.asked
    assert moment.f.shape == (6, 2)
    assert moment.asked
    assert moment.capture_seconds == 0.0
