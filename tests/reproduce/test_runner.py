"""``gramscope reproduce``: jobs run, resumed and failed; verdicts; what is written; what is refused."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from gramscope.base.errors import InputError
from gramscope.cli.main import app
from gramscope.reproduce.expected import Expected, read_expected
from gramscope.reproduce.experiments import open_experiment
from gramscope.reproduce.verdicts import bootstrap_interval, judge
from gramscope.reproduce.writing import MARKER, hand_written, read_table
from test_docs import module_of

findings_table = module_of(Path(__file__).parents[2] / "tools" / "findings_table.py")

RUN = """
TITLE = "A toy"
QUESTION = "Is the number the one that was published?"
SEEDS = 2
def cases(quick):
    return [{"size": 1, "kind": "None"}] if quick else [{"size": 1, "kind": "None"}, {"size": 2, "kind": "b"}]
def run(case, seed, *, quick, device, out):
    with open(out / "called", "a") as file:
        file.write("x")
    if (out.parent.parent / "broken").exists() and case["size"] == 2:
        raise ValueError("the disk of the moon is full")
    return {"value": case["size"] + 0.1 * seed, "lost": float("nan")}
def figure(table, path):
    path.write_bytes(b"drawn")
"""
EXPECTED = """
[[value]]
case = {size = 1}
name = "value"
published = 1.0
source = "a paper, table 1"
tolerance = 0.06
why = "the sd of two seeds"
[[value]]
case = {size = 2, kind = "b"}
name = "value"
published = 1.0
source = "a paper, table 1"
tolerance = 0.2
kind = "relative"
why = "the sd of two seeds"
[[value]]
name = "lost"
published = "not published"
source = "here"
why = "nobody knows it"
"""


@pytest.fixture
def folder(tmp_path):
    toy = tmp_path / "experiments" / "toy"
    toy.mkdir(parents=True)
    (toy / "run.py").write_text(RUN)
    (toy / "expected.toml").write_text(EXPECTED)
    return tmp_path


def call(folder, *arguments, name="toy", code=0):
    result = CliRunner().invoke(
        app, ["reproduce", name, "--experiments", str(folder / "experiments"), "--json", *arguments]
    )
    assert result.exit_code == code, result.output
    return json.loads(result.output.strip().splitlines()[-1])


def out(folder):
    return "--out", str(folder / "out")


def calls(folder):
    return sum(len(path.read_text()) for path in (folder / "out").glob("*/called"))


def test_all_cases_and_seeds_are_run_once_and_compared(folder):
    found = call(folder, *out(folder))
    assert [row["verdict"] for row in found["rows"]] == ["agrees", "differs", "not finite"]
    assert [row["mean"] for row in found["rows"]][:2] == pytest.approx([1.05, 2.05])
    table = read_table(folder / "out" / "result.csv")
    assert list(table.columns) == ["size", "kind", "seed", "seconds", "cpu_seconds", "value", "lost"]
    assert table["kind"].tolist() == ["None", "None", "b", "b"]
    assert table["lost"].isna().all()
    assert calls(folder) == 4
    again = call(folder, *out(folder))
    assert again["rows"] == found["rows"]
    assert calls(folder) == 4
    record = json.loads((folder / "out" / "reproduce.json").read_text())
    assert [one["jobs"] for one in record["calls"]] == [4]
    assert call(folder, *out(folder), "--seeds", "3")["rows"][0]["seeds"] == "3"
    assert calls(folder) == 6


def test_every_case_is_run_once_before_the_next_seed(folder):
    """So that a call which is stopped says something of each case."""
    call(folder, *out(folder))
    begun = sorted((folder / "out").glob("*/called"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.parent.name[-6:] for path in begun] == ["seed-0", "seed-0", "seed-1", "seed-1"]


def test_lists_and_defaults_stand_for_single_values(folder):
    toy = folder / "experiments" / "toy"
    written_out = read_expected(toy)
    (toy / "expected.toml").write_text("""
[default]
source = "a paper, table 1"
why = "the sd of two seeds"
published = 1.0
[[value]]
case = [{size = 1}, {size = [2, 3], kind = "b"}]
name = ["value", "other"]
tolerance = 0.06
control = true
[[value]]
name = "lost"
published = "not published"
""")
    found = read_expected(toy)
    cases = [{"size": 1}, {"size": 2, "kind": "b"}, {"size": 3, "kind": "b"}]
    assert [(one.case, one.name) for one in found[:-1]] == [
        (case, name) for case in cases for name in ("value", "other")
    ]
    assert all(one.published == 1.0 and one.control and one.tolerance == 0.06 for one in found[:-1])
    assert (found[0].source, found[0].why) == (written_out[0].source, written_out[0].why)
    assert found[-1].published is None
    assert not found[-1].control


def test_controls_are_judged_and_not_counted(folder):
    toy = folder / "experiments" / "toy"
    text = (toy / "expected.toml").read_text()
    (toy / "expected.toml").write_text(text.replace('kind = "relative"', 'kind = "relative"\ncontrol = true'))
    found = call(folder, *out(folder))
    assert [row["verdict"] for row in found["rows"]] == ["agrees", "control: differs", "not finite"]
    result = (folder / "out" / "RESULT.md").read_text()
    assert "Of 1 published numbers 1 agree and 0 differ. 1 controls, not counted. 1 not finite." in result
    # After a change of expected.toml the verdicts of a result are written anew, and nothing else.
    (toy / "result.csv").write_bytes((folder / "out" / "result.csv").read_bytes())
    (toy / "expected.toml").write_text(text)
    anew = findings_table.with_verdicts(result, open_experiment(toy))
    assert anew == result.replace("control: differs", "differs").replace(
        "Of 1 published numbers 1 agree and 0 differ. 1 controls, not counted.",
        "Of 2 published numbers 1 agree and 1 differ.",
    )


def test_jobs_in_processes_give_the_same_numbers(folder):
    here = call(folder, *out(folder))
    elsewhere = call(folder, "--out", str(folder / "other"), "--jobs", "2", "--quick")
    assert elsewhere["rows"][0]["mean"] == 1.0  # one seed
    assert elsewhere["rows"][1]["verdict"] == "not run"
    assert here["rows"][0]["mean"] == pytest.approx(1.05)


def test_a_failed_job_is_named_and_tried_again(folder):
    (folder / "broken").touch()
    found = call(folder, *out(folder), code=1)
    assert len(found["failed"]) == 2
    assert "the disk of the moon is full" in found["failed"][0]
    assert "the disk of the moon" in (folder / "out" / "RESULT.md").read_text()
    assert found["rows"][1]["verdict"] == "not run"
    (folder / "broken").unlink()
    written = call(folder, *out(folder), "--only-write", "--seeds", "1", code=1)
    assert [line.partition(": ")[2] for line in written["failed"]] == ["not run"]
    assert calls(folder) == 4  # two that ended well and two that failed, of which nothing was run again
    assert call(folder, *out(folder))["failed"] == []


def test_where_every_job_fails_the_reason_is_told(folder):
    run = folder / "experiments" / "toy" / "run.py"
    run.write_text(RUN.replace('if (out.parent.parent / "broken").exists() and case["size"] == 2:', "if True:"))
    found = call(folder, *out(folder), code=1)
    assert len(found["failed"]) == 4
    assert {row["verdict"] for row in found["rows"]} == {"not run"}
    assert "no job ended well" in (folder / "out" / "RESULT.md").read_text()


def test_hand_written_text_is_kept_and_only_full_results_are_published(folder):
    toy = folder / "experiments" / "toy"
    call(folder, *out(folder), "--publish")
    result = toy / "RESULT.md"
    assert MARKER in result.read_text()
    result.write_text(result.read_text() + "What would change our mind: a third seed.\n")
    call(folder, *out(folder), "--seeds", "3", "--publish")
    assert hand_written(result) == "What would change our mind: a third seed.\n"
    assert "--seeds 3" in result.read_text()
    assert len(read_table(toy / "result.csv")) == 6
    assert (toy / "figure.png").read_bytes() == b"drawn"
    assert "third seed" in (folder / "out" / "page.html").read_text()
    assert "--quick" in call(folder, "--quick", "--publish", code=2)["error"]


def test_results_of_other_code_are_refused_but_figures_may_be_drawn_anew(folder):
    call(folder, *out(folder), "--quick")
    run = folder / "experiments" / "toy" / "run.py"
    run.write_text(RUN.replace('b"drawn"', 'b"drawn better"') + "# a remark\n")
    call(folder, *out(folder), "--quick")
    assert (folder / "out" / "figure.png").read_bytes() == b"drawn better"
    run.write_text(RUN.replace("0.1 * seed", "0.2 * seed"))
    assert "another code" in call(folder, *out(folder), "--quick", code=2)["error"]
    run.write_text(RUN)
    assert "another quick" in call(folder, *out(folder), code=2)["error"]


def test_data_that_is_missing_is_named(folder, monkeypatch):
    run = folder / "experiments" / "toy" / "run.py"
    run.write_text(RUN + 'NEEDS = "wheel:no-such-package"\n')
    assert "no-such-package" in call(folder, *out(folder), code=2)["error"]
    monkeypatch.setenv("GRAMSCOPE_DATA", str(folder))
    run.write_text(RUN + 'NEEDS = "no-such-images"\n')
    assert "no-such-images" in call(folder, *out(folder), code=2)["error"]
    run.write_text(RUN + 'NEEDS = "no-such-images"\nQUICK_NEEDS = ""\n')
    shown = CliRunner().invoke(app, ["reproduce", "list", "--experiments", str(folder / "experiments")])
    assert "not for --quick" in " ".join(shown.output.replace("│", " ").split())
    listed = call(folder, name="list")["experiments"]
    assert listed[0]["name"] == "toy"
    assert "no-such-images" in listed[0]["missing"]
    (folder / "no-such-images").mkdir()
    call(folder, *out(folder))


def test_unknown_names_and_folders_are_refused(folder, tmp_path):
    assert "must be one of the experiments, which are toy" in call(folder, name="toi", code=2)["error"]
    (tmp_path / "empty" / "experiments").mkdir(parents=True)
    assert "clone the repository" in call(tmp_path / "empty", name="list", code=2)["error"]
    (folder / "experiments" / "toy" / "run.py").write_text(RUN.replace("def figure", "def picture"))
    assert "has no figure" in call(folder, *out(folder), code=2)["error"]
    (folder / "experiments" / "toy" / "run.py").write_text(RUN.replace("QUESTION", "ASKED"))
    assert "QUESTION" in call(folder, *out(folder), code=2)["error"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tolerance = 0.06", "tolerance = 'small'", "tolerance of value 1"),
        ("tolerance = 0.06", "tolerence = 0.06", "tolerence"),
        ("published = 1.0", "published = nan", "published of value 1"),
        ('kind = "relative"', 'kind = "about"', "kind of value 2"),
        ('kind = "relative"', 'control = "yes"', "control of value 2 .* must be true or false"),
        ('why = "the sd of two seeds"', "", "must have why"),
        ("[[value]]", "[[value", "must be TOML"),
    ],
)
def test_a_wrong_expected_file_is_refused(folder, old, new, message):
    toy = folder / "experiments" / "toy"
    (toy / "expected.toml").write_text(EXPECTED.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        read_expected(toy)


def test_bounds_and_tolerances():
    def value(kind, tolerance=0.0):
        return Expected({}, "v", -2.0, "", tolerance, kind)

    assert value("relative", 0.1).allows(-2.19)
    assert not value("relative", 0.1).allows(-2.21)
    assert not value("absolute", 0.1).allows(-2.19)
    assert value("at least").allows(-2.0)
    assert not value("at least").allows(-2.01)
    assert value("at most", 0.1).allows(-1.91)
    assert not value("at most").allows(-1.9)


def test_the_interval_is_that_of_the_mean():
    rng = np.random.default_rng(1)
    sample = rng.normal(size=400)
    low, high = bootstrap_interval(sample)
    # The percentile interval of a mean of many values is ±1.96 standard errors; its own noise is about 2 %.
    error = sample.std() / 20
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.05)
    assert (high + low) / 2 == pytest.approx(sample.mean(), abs=0.1 * error)
    assert all(math.isnan(end) for end in bootstrap_interval(sample[:1]))


def test_rows_are_chosen_by_all_settings_of_a_case():
    table = pd.DataFrame({"lr": [0.1, 0.1, 0.2], "deep": [True, False, True], "v": [1.0, 2.0, 4.0]})
    found = judge(table, [Expected({"lr": 0.1, "deep": True}, "v", None, ""), Expected({"lr": 0.3}, "v", 1.0, "")])
    assert [(one.seeds, one.verdict) for one in found] == [(1, "new"), (0, "not run")]
    assert found[0].mean == 1


def test_the_module_is_the_command(folder, monkeypatch, capsys):
    import runpy

    monkeypatch.setattr(sys, "argv", ["-m", "list", "--json", "--experiments", str(folder / "experiments")])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("gramscope.reproduce", run_name="__main__")
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["experiments"][0]["title"] == "A toy"


def test_the_head_of_a_run_file_is_read_without_running_it(folder):
    run = folder / "experiments" / "toy" / "run.py"
    run.write_text("raise SystemError\n" + RUN)
    assert open_experiment(run.parent).seeds == 2
