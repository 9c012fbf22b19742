"""Bad input, rules that cannot judge, ranking, the command and the page; and small real runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import gramscope as gs
from diagnose import histories
from diagnose.histories import BROKEN, META, STEPS, healthy_scalars, history
from gramscope.base.errors import GramscopeError, InputError
from gramscope.cli.main import app
from gramscope.diagnose import RULES, Finding
from gramscope.diagnose.finding import NOTHING_WRONG
from gramscope.diagnose.history import history_of_records
from gramscope.diagnose.ranking import diagnosis_of, rank
from gramscope.diagnose.run_diagnosis import diagnose_all
from gramscope.store import RunWriter
from gramscope.tasks import digits, mlp


@pytest.fixture
def folder(tmp_path):
    """A frozen layer, written by hand."""
    with RunWriter.create(tmp_path / "a", META) as writer:
        for step in STEPS:
            writer.append(step, healthy_scalars(step) | {"frozen/2": 1.0})
    return tmp_path / "a"


def test_two_records_are_too_few_to_judge(tmp_path):
    with RunWriter.create(tmp_path / "a", META) as writer:
        for step in (0, 1):
            writer.append(step, healthy_scalars(step))
    found = gs.diagnose(tmp_path / "a")
    assert [f.kind for f in found.findings] == [NOTHING_WRONG]
    assert "2 measurements" in found[0].what
    assert found[0].confidence != found[0].confidence  # nothing that could be right or wrong


def test_a_young_run_is_not_called_sound_without_a_word():
    rows = [(step, healthy_scalars(step)) for step in STEPS]
    for count, early in ((4, True), (len(STEPS), False)):
        found = diagnosis_of(history_of_records(rows[:count], {}, META))
        assert found.healthy
        assert ("It is early: there are 4 measurements" in found[0].what) == early


def test_a_run_without_the_new_measures_says_what_it_cannot_judge(tmp_path):
    with RunWriter.create(tmp_path / "old", META) as writer:
        for step in STEPS:
            writer.append(step, {"loss/probe": 2.0 / (1 + step), "kernel/drift": 0.1 * step})
    found = gs.diagnose(tmp_path / "old")
    assert found.healthy
    assert "scope.use(optimizer)" in found.not_judged["not_in_optimizer"]
    assert "scope.step(loss=loss)" in found.not_judged["loss_spikes"]
    assert "by 1 of" in found[0].what or "rules" in found[0].what
    assert set(found.not_judged) < set(RULES)


def test_a_run_of_another_version_names_it():
    rows = [(step, {"loss/probe": 2.0 / (1 + step)}) for step in STEPS]
    reason = diagnosis_of(history_of_records(rows, {}, META | {"gramscope": "0.1.0"})).not_judged["rank_collapse"]
    assert reason.startswith("gramscope 0.1.0, which recorded this run, may not have measured it")
    assert "gramscope" not in diagnosis_of(history_of_records(rows, {}, META)).not_judged["rank_collapse"]


def test_measures_that_were_left_out_are_the_reason():
    """Whether a network has dropout, batch norm or tokens is not known without the set-up."""
    found = diagnosis_of(history_of_records([(step, {"norm/parameters": 9.0}) for step in STEPS], {}, META))
    assert found.not_judged["wrong_mode"] == found.not_judged["oversmoothing"] == "leave measures= at its default"
    assert found.not_judged["labels"] == "pass a probe with targets: probe=(x, y); leave measures= at its default"
    without = {name: value for name, value in healthy_scalars(1).items() if name != "training_mode"}
    assert "not needed" in diagnosis_of(history_of_records([(0, without)] * 4, {}, META)).not_judged["wrong_mode"]


def test_one_rule_that_fails_does_not_lose_what_the_others_find(monkeypatch):
    def fail(history):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(RULES, "head_only", replace(RULES["head_only"], find=fail))
    found = diagnosis_of(BROKEN["frozen_layer"]())
    assert found[0].kind == "frozen_layer"
    assert "division by zero" in found.not_judged["head_only"]


def test_a_run_that_has_not_learnt_is_not_called_sound_without_a_word():
    plateau = histories._both(histories._stuck, histories._set(gradient_overlap=0.95))
    idle = diagnosis_of(history(plateau, losses=np.full(250, 2.3)))
    assert "hardly learnt: 0 %" in idle[0].what
    assert np.isnan(idle[0].confidence)
    assert "hardly" not in diagnosis_of(history())[0].what


def test_a_loss_of_ones_own_is_the_reason_where_chance_is_not_known():
    own = diagnosis_of(history().leaving_out(("probe/chance",)))
    for kind in ("labels", "classes_in_order"):
        assert "loss= of your own" in own.not_judged[kind]


def test_a_run_without_any_record(tmp_path):
    RunWriter.create(tmp_path / "a", META).close()
    found = gs.diagnose(tmp_path / "a")
    assert "0 measurements" in found[0].what


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_series_that_are_not_finite_are_left_out_and_never_raise(value):
    names = {name.partition("/")[0]: name for step in STEPS for name in healthy_scalars(step)}
    for broken in names.values():
        rows = [(step, healthy_scalars(step) | {broken: value}) for step in STEPS]
        found = diagnosis_of(history_of_records(rows, {}, META))
        diverged = broken in ("loss/probe", "norm/parameters")
        allowed = {NOTHING_WRONG, "lr_too_large"} if diverged else {NOTHING_WRONG}
        assert {f.kind for f in found.findings} <= allowed, broken


def test_meta_of_strangers_is_harmless():
    for meta in ({}, {"layers": 3, "parameters": []}, {"layers": [1, None], "parameters": {"0.weight": "x"}}):
        assert diagnosis_of(history_of_records([(0, {"loss/probe": 1.0})], {}, meta)).healthy


@pytest.mark.parametrize("wrong", [3, None, ["runs/a"], {}])
def test_other_things_than_folders_are_refused(wrong):
    with pytest.raises(InputError, match="run must be a folder"):
        gs.diagnose(wrong)
    with pytest.raises(InputError, match="run must be a folder"):
        diagnose_all([wrong])


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(GramscopeError, match="does not exist"):
        gs.diagnose(tmp_path / "nothing")
    with pytest.raises(InputError, match="at least one"):
        diagnose_all([])


def _finding(kind, step=0.0):
    return Finding(kind, "what.", (), "cause.", "remedy.", step=step)


def test_consequences_follow_their_cause_and_the_earlier_of_two_that_explain_each_other_leads():
    found = rank({k: _finding(k) for k in ("class_missing", "lr_too_small", "frozen_layer")})
    assert [f.kind for f in found] == ["frozen_layer", "class_missing", "lr_too_small"]
    assert [f.follows_from for f in found] == ["", "lr_too_small", "frozen_layer"]
    early = rank({"dead_units": _finding("dead_units", 0.0), "half_precision": _finding("half_precision", 4.0)})
    late = rank({"dead_units": _finding("dead_units", 9.0), "half_precision": _finding("half_precision", 4.0)})
    assert [f.kind for f in early] == ["dead_units", "half_precision"]
    assert [f.kind for f in late] == ["half_precision", "dead_units"]


def test_of_findings_that_explain_one_another_in_a_circle_the_earliest_leads():
    steps = {"dead_units": 4.0, "labels": 0.0, "rank_collapse": 0.0}
    found = rank({kind: _finding(kind, step) for kind, step in steps.items()})
    assert [f.kind for f in found if not f.follows_from] == ["labels"]


@given(st.dictionaries(st.sampled_from(sorted(RULES)), st.integers(0, 3), min_size=1))
def test_some_finding_leads_and_every_other_goes_back_to_one_that_does(steps):
    found = {f.kind: f for f in rank({kind: _finding(kind, float(step)) for kind, step in steps.items()})}
    for kind in found:
        chain = [kind]
        while found[chain[-1]].follows_from:
            chain.append(found[chain[-1]].follows_from)
            assert len(chain) <= len(found)


def test_ranking_drops_no_finding_and_repeats_none():
    everything = {kind: _finding(kind) for kind in RULES}
    assert sorted(f.kind for f in rank(everything)) == sorted(RULES)


def test_the_command_prints_findings_and_json(folder):
    runner = CliRunner()
    shown = runner.invoke(app, ["diagnose", str(folder)])
    assert shown.exit_code == 0
    assert "frozen_layer" in shown.output
    assert "Try first: If this is not meant" in shown.output
    found = json.loads(runner.invoke(app, ["diagnose", str(folder.parent), "--json"]).output)
    assert found[0]["run"] == "a"
    assert found[0]["findings"][0]["kind"] == "frozen_layer"
    assert runner.invoke(app, ["diagnose", str(folder / "nothing")]).exit_code == 2


def test_what_is_not_finite_is_said_in_words():
    rows = [(step, healthy_scalars(step) | ({"norm/parameters": float("nan")} if step > 9 else {})) for step in STEPS]
    text = str(diagnosis_of(history_of_records(rows, {}, META)))
    assert "(weights from step 10 on: not finite)" in text
    assert "nan" not in text


def test_json_holds_no_nan():
    for make in BROKEN.values():
        json.dumps(diagnosis_of(make()).json(), allow_nan=False)


def test_the_page_begins_with_the_diagnosis(folder, tmp_path):
    page = gs.report(folder, tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.index("What is wrong") < page.index('class="lead"')
    assert "Nothing is trained in layer 2" in page
    assert "If this is not meant" in page


def test_text_of_a_strange_run_is_escaped(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    with RunWriter.create(tmp_path / "a", META) as writer:
        for step in STEPS:
            writer.append(step, healthy_scalars(step) | {f"frozen/{evil}": 1.0})
    page = gs.report(tmp_path / "a", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page


def test_the_text_of_a_diagnosis_names_all_that_a_finding_has():
    text = str(diagnosis_of(BROKEN["labels"](), "a"))
    parts = ("a, up to step 250", "1. labels", "Likely cause:", "It may also be:", "Try first:", "diagnosis.md#labels")
    for part in parts:
        assert part in text
    assert str(diagnosis_of(history())).count("\n") <= 1


MEASURES = ["loss", "gradient", "update", "dead_units", "signals", "setup", "given_gradients", "probe_facts"]


def train(change, steps=20, tell=None):
    """A short run on digits with one mistake; ``change(model)`` gives the optimiser, and whether to zero gradients."""
    task = digits()
    model = mlp((64, 16, 16, 10))
    optimizer, zero = change(model)
    probe = task.x_test[:60], task.y_test[:60]
    with gs.watch(model, probe=probe, on_alert=tell, measures=MEASURES) as scope:
        scope.use(optimizer)
        for step in range(steps):
            rows = slice(40 * (step % 30), 40 * (step % 30) + 40)
            if zero:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(task.x[rows]), task.y[rows])
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr), True


def frozen(model):
    model[2].requires_grad_(False)
    return sgd(model)


def missing(model):
    return torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1), True


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (sgd, NOTHING_WRONG),
        (frozen, "frozen_layer"),
        (missing, "not_in_optimizer"),
        (lambda model: (sgd(model)[0], False), "gradients_not_zeroed"),
    ],
)
def test_real_runs_are_told_apart(change, kind):
    assert train(change).findings[0].kind == kind


def test_findings_are_told_while_training(monkeypatch):
    monkeypatch.setattr("gramscope.record.findings.SURE", -1.0)
    monkeypatch.setitem(gs.diagnose.held_out_rates.COUNTS, "frozen_layer", (9, 9))
    told = []
    scope = train(frozen, steps=4, tell=told.append)
    assert [alert.what for alert in told] == ["frozen_layer"]
    assert told[0].where == "2"
    assert "Try first" in str(told[0])
    assert scope.findings[0].kind == "frozen_layer"
    assert not scope.alerts  # those of the alert rules alone


def test_a_consequence_has_no_remedy_of_its_own(tmp_path):
    """Steps that are too long leave dead layers, which then look like steps that are too short."""
    with RunWriter.create(tmp_path / "a", META) as writer:
        for step in STEPS:
            writer.append(step, healthy_scalars(step) | {"frozen/2": 1.0, "dead_units/2": 1.0})
    found = gs.diagnose(tmp_path / "a")
    later = rank({kind: _finding(kind) for kind in ("lr_too_large", "lr_too_small")})
    assert [finding.follows_from for finding in later] == ["", "lr_too_large"]
    assert "Try first" in str(later[0])
    assert "Try first" not in str(later[1])
    page = gs.report(tmp_path / "a", tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("Try first:") == sum(not finding.follows_from for finding in found.findings)
