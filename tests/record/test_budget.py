"""What is measured when, by a clock that only goes when it is told to."""

import itertools

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import WATCHED_MEASURES, MeasuredValues, WatchedMeasure
from gramscope.record.budget import GUARANTEED, MARGIN, WIDEST, Budget, closing_line
from gramscope.record.groups import CHEAP_PART

X, Y = torch.randn(6, 4), torch.randint(0, 2, (6,))
SHARE, STEP = 0.05, 0.02
LOG = [0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63, 79, 100, 126, 158, 200, 251, 316, 398, 501, 631, 794]


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
    """Adds a measure that takes so many seconds, the first time more; the steps at which it was taken."""

    def add(name, warm, cold=None, guess=None, passes=0):
        steps = []

        def take(measurement):
            clock.now += warm if steps or cold is None else cold
            steps.append(measurement.step)
            return MeasuredValues({f"{name}/value": 1.0})

        estimate = None if guess is None else (lambda subject, one: guess)
        measure = WatchedMeasure(name, take, False, "", True, estimate, passes=lambda subject: passes)
        monkeypatch.setitem(WATCHED_MEASURES, name, measure)
        return steps

    return add


def train(scope, clock, steps, seconds=STEP):
    for _ in range(steps):
        clock.now += seconds
        scope.step()


def watch(measures, every="log:10", overhead=SHARE, out=None):
    return gs.watch(nn.Linear(4, 2), X, out, every=every, measures=measures, overhead=overhead)


def test_a_large_model_has_twenty_measurements_in_2000_steps(clock, register, monkeypatch):
    """Costs in seconds, estimated for GPT-2 small on an H200: a step 0.0386, the opening 1.3, the pass, the kernel."""
    passes = []

    def shared_pass(measurement):
        clock.now += 0.055 if passes else 0.75
        passes.append(measurement.step)

    monkeypatch.setattr("gramscope.record.measurement.Measurement.open", shared_pass)
    register("cheap", 0.028, cold=0.2)
    kernels = register("kernel of a language model", 0.158, cold=0.366, passes=3)
    with watch(["cheap", "kernel of a language model"]) as scope:
        train(scope, clock, 2000, 0.0386)
    assert len(passes) == len(scope.records) == 20
    assert kernels == [0, 10, 100, 1585, 2000], "not twice at the start to see what it costs: that is known"
    assert scope.overhead < 0.05


@pytest.mark.parametrize("steps", [40, 40_000])
@pytest.mark.parametrize("seconds", [1e-4, 10.0])
def test_every_run_has_a_page(clock, register, steps, seconds):
    """A measurement of 5 s, in a loop of tenths of milliseconds and in one of tens of seconds a step."""
    taken = register("plain", 5.0)
    with gs.watch(nn.Linear(4, 2), X, measures="plain") as scope:
        train(scope, clock, steps, seconds)
    assert len(taken) >= 12
    assert taken[:GUARANTEED] == LOG[:GUARANTEED]
    assert taken[-1] == steps
    assert all(after <= 1.3 * WIDEST * before + 1 for before, after in itertools.pairwise(taken)), "no long blank"


def test_two_runs_are_measured_at_the_same_steps(clock, register):
    """Small networks are cheap to measure in seconds, however fast they train: nothing is left out."""
    runs = []
    for seconds in (1e-3, 2e-3):
        taken = register("plain", 0.01)
        train(watch(["plain"]), clock, 800, seconds)
        runs.append(list(taken))
    assert runs == [LOG, LOG]


def test_all_measures_are_of_the_same_steps_where_time_allows(clock, register):
    cheap, expensive = register("cheap", 1e-3), register("expensive", 0.01, guess=0.01)
    scope = watch(["cheap", "expensive"])
    train(scope, clock, 800)
    assert cheap == expensive == LOG
    assert all(not record["skipped"] for record in scope.records)


def test_an_expensive_measure_is_taken_beside_the_others_or_not_at_all(clock, register):
    cheap, expensive = register("cheap", 1e-3), register("expensive", 1.0, guess=1.0)
    scope = watch(["cheap", "expensive"], every=20)
    train(scope, clock, 4000, 0.1)
    assert cheap == list(range(0, 4001, 20))
    # The first is charged to all; the others have their part of the time that is left.
    assert len(expensive) == pytest.approx(1 + (1 - CHEAP_PART) * (MARGIN * SHARE * 400 - 1.0), abs=1)
    assert set(expensive) <= set(cheap)
    skipping = [record for record in scope.records if record["skipped"]]
    assert len(skipping) == len(cheap) - len(expensive)
    assert all(record["skipped"] == ["expensive"] and record["scalars"]["skipped"] == 1.0 for record in skipping)


def test_a_long_run_keeps_its_share_with_everything_counted(clock, register):
    """The opening with its warm-up and the guaranteed measurements too."""
    taken = register("plain", 0.1, cold=3.0)
    scope = watch(["plain"], every=1)
    train(scope, clock, GUARANTEED - 1, 0.1)
    assert len(taken) == GUARANTEED
    train(scope, clock, 2000, 0.1)
    allowed = MARGIN * SHARE * 2011 * 0.1
    assert allowed - 0.15 <= scope.budget.spent <= allowed
    assert scope.overhead < SHARE
    gaps = [b - a for a, b in itertools.pairwise(taken)]
    assert max(gaps[-5:]) <= 1.1 / (MARGIN * SHARE), "what is left is spread evenly"


def test_the_warm_up_is_not_charged_in_a_short_run(clock, register):
    taken = register("plain", 0.01, cold=3.0)
    scope = watch(["plain"], every=1)
    train(scope, clock, 60)
    assert taken == list(range(61))
    assert scope.budget.spent == pytest.approx(3.0 + 60 * 0.01)


def test_measures_that_do_not_fit_leave_their_time_to_the_others(clock, register):
    """One takes all the time of the run: the other expensive one has their common part alone."""
    register("cheap", 1e-3)
    one, endless = register("one", 0.5, guess=0.5), register("endless", 100.0, guess=100.0)
    train(watch(["cheap", "one", "endless"], every=20), clock, 4000, 0.1)
    assert endless == []
    assert len(one) == pytest.approx(1 + (1 - CHEAP_PART) * (MARGIN * SHARE * 400 - 0.5) / 0.5, abs=1.5)


def test_both_ends_of_a_series_are_measured(clock, register):
    """Also of a measure that turned out to be expensive; one that says so beforehand must wait for its time."""
    register("cheap", 1e-3)
    expensive, guessed = register("expensive", 2.0), register("guessed", 2.0, guess=2.0)
    with watch(["cheap", "expensive", "guessed"], every=10) as scope:
        train(scope, clock, 205)
    assert expensive[0] == 0
    assert expensive[-1] == 205
    assert guessed == []


def test_weights_are_copied_only_before_a_step_that_will_be_measured(clock, register):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register("plain", 0.029)
    scope = gs.watch(model, X, every=1, measures=["plain", "update"]).use(optimizer)
    copied = []
    for step in range(1, 121):
        clock.now += 1e-4
        model(X).sum().backward()
        optimizer.step()
        copied += [step] * bool(scope.subject.updates._before)
        scope.step()
    assert copied == [record["step"] for record in scope.records[1:]]
    assert GUARANTEED < len(copied) < 80
    assert all("update_ratio/weight" in record["scalars"] for record in scope.records[1:])


def test_a_measure_that_turns_out_expensive_does_not_hold_up_the_others(clock, register):
    cheap, expensive = register("cheap", 1e-3), register("expensive", 0.4)
    train(watch(["cheap", "expensive"], every=10), clock, 1000)
    assert cheap == list(range(0, 1001, 10))
    assert expensive == [0, 10, 100, 1000], "one with warm-up, one that tells its cost, then one in ten times the steps"


def test_a_cold_start_is_neither_charged_nor_an_estimate(clock, register):
    taken = register("plain", 0.01, cold=5.0)
    scope = watch(["plain"])
    assert scope.budget.cold["plain"] == pytest.approx(5.0)
    assert "plain" not in scope.budget.costs
    train(scope, clock, 1)
    assert scope.budget.costs["plain"] == pytest.approx(0.01)
    train(scope, clock, 799)
    assert taken == LOG
    assert scope.budget.used["together"] == pytest.approx(0.01 * (len(LOG) - 1)), "all but the first"
    assert scope.overhead == pytest.approx((5.0 + 0.01 * (len(LOG) - 1)) / (800 * STEP)), "what was paid in all"


def test_a_cold_start_of_an_expensive_measure_does_not_hide_its_cost(clock, register):
    """Its own estimate says what it will cost when it is warm."""
    register("plain", 1e-3)
    expensive = register("expensive", 0.02, cold=3.0, guess=0.025)
    train(watch(["plain", "expensive"]), clock, 800)
    assert expensive == LOG


def test_a_disturbed_start_of_an_expensive_measure_is_forgotten(clock, register):
    """Its first warm time tells too much, its own estimate does not."""
    register("plain", 1e-3)
    times = iter([3.0, 0.1] + [0.002] * 100)
    expensive = []

    def take(measurement):
        clock.now += next(times)
        expensive.append(measurement.step)
        return MeasuredValues({"expensive/value": 1.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            WATCHED_MEASURES,
            "expensive",
            WatchedMeasure("expensive", take, False, "", True, lambda subject, one: 0.025),
        )
        train(watch(["plain", "expensive"]), clock, 40)
    assert expensive == LOG[:15]


def test_one_disturbed_measurement_is_forgotten(clock, register):
    taken = register("plain", 2e-3)
    scope = watch(["plain"], every=1)
    train(scope, clock, 20)
    scope.budget.note("plain", 5.0)  # the machine slept
    scope.budget.spent -= 5.0
    train(scope, clock, 20)
    assert taken == list(range(41))


def test_only_expensive_measures_are_measured_all_the_same(clock, register):
    expensive = register("expensive", 2.0, guess=2.0)
    with watch(["expensive"]) as scope:
        train(scope, clock, 40)
    assert len(expensive) >= 12


def test_without_a_limit_all_is_measured_at_every_due_step(clock, register):
    cheap, expensive = register("cheap", 1.0), register("expensive", 50.0, guess=50.0)
    train(watch(["cheap", "expensive"], every=2, overhead=None), clock, 40)
    assert cheap == expensive == list(range(0, 41, 2))


def test_what_is_logged_is_kept_when_nothing_can_be_measured(tmp_path, clock, register):
    register("plain", 2.0)
    with watch(["plain"], every=1, out=tmp_path / "a") as scope:
        for step in range(1, 1001):
            clock.now += STEP
            scope.step(loss=1.0 / step, lr=0.1)
        run = gs.open_run(tmp_path / "a")
        assert len(run.logged()["loss"]) > 900, "all but those of the last second are on the disk while it trains"
    expected = {step: 1.0 / step for step in range(1, 1001)}
    assert scope.logged["loss"] == expected
    run.refresh()
    assert run.logged()["loss"].to_dict() == expected
    assert run.logged()["lr"].to_dict() == dict.fromkeys(expected, 0.1)
    assert GUARANTEED < len(run.steps) < GUARANTEED + 13  # one at nearly twice the steps, and the last


def test_what_was_paid_stands_still_after_the_end(clock, register):
    register("plain", 0.01)
    scope = watch(["plain"], every=1, overhead=None)
    train(scope, clock, 10)
    before = scope.overhead
    scope.close()
    assert scope.overhead == pytest.approx(before)
    clock.now += 1000.0
    assert scope.overhead == pytest.approx(before)
    assert before == pytest.approx(0.11 / 0.2)


def test_a_resumed_run_has_no_second_set_of_guaranteed_measurements(tmp_path, clock, register):
    with gs.watch(nn.Linear(4, 2), X, tmp_path / "a", measures="norm") as scope:
        train(scope, clock, 3)
    taken = register("plain", 3.0)
    options = {"measures": "plain", "resume": 1_000_000}
    scope = gs.watch(nn.Linear(4, 2), X, tmp_path / "a", every=1, **options)
    train(scope, clock, 20)
    assert len(taken) == 2, "one that includes warm-up, and one that tells what it costs"


def test_a_rehearsal_waits_for_its_optimiser():
    model = nn.Linear(4, 2)
    scope = gs.watch(model, (X, Y), measures=["step", "norm"], every=1, overhead=None)
    assert "step" not in scope.budget.taken
    scope.use(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert "step/error" in scope.records[-1]["scalars"]


@pytest.mark.parametrize("wrong", [0, 1, -0.1, "a", True, [0.1], float("nan")])
def test_the_share_is_a_fraction(wrong):
    with pytest.raises(InputError, match="overhead must be a fraction"):
        Budget(wrong)


def test_one_line_at_the_end(clock, register, capsys):
    register("cheap", 0.01)
    register("expensive", 20.0, guess=20.0)
    with watch(["cheap", "expensive"], every=1) as scope:
        train(scope, clock, 600, 1e-3)
        assert capsys.readouterr().err == ""
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.strip() == closing_line(scope.records, scope.chosen_measures, scope.budget, scope._left_out)
    assert (
        f"{len(scope.records)} measurements at steps 0 to 600 (cheap {len(scope.records)} times; expensive 0)" in said
    )
    assert f"{scope._left_out} due steps were left out to keep overhead=0.05. This is more than" in said
    assert scope._left_out == 601 - len(scope.records) > 400
    scope.close()
    assert capsys.readouterr().err == ""


def test_a_short_run_says_why_it_cost_more(clock, register, capsys):
    register("cheap", 0.1)
    with watch(["cheap"]) as scope:
        train(scope, clock, 20)
    assert (
        "took 1.2 s, 300 % of training. This is more than overhead=0.05, because the run was short (0.4 s of "
        "training): the first 13 measurements, the warm-up of the first (0.1 s) and 1.5 s of measuring are always "
        "allowed.\n" in capsys.readouterr().err
    )
    assert len(scope.records) == 12


def test_next_to_no_training_is_told_in_seconds():
    """A per cent of nothing would be some hundred thousand."""
    budget = Budget(None, started=0.0, spent=3.0, ended=3.1, taken={"loss": 2})
    assert "took 3.0 s, beside 0.1 s of training." in closing_line([{"step": 0}, {"step": 1}], ["loss"], budget, 0)


def test_a_watch_that_saw_no_step_says_nothing(capsys):
    watch(["norm"]).close()
    assert capsys.readouterr().err == ""
