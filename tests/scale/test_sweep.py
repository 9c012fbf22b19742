"""Sweeps: grids, run folders, failures recorded and retried, resuming, engines, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from gramscope.base.errors import InputError
from gramscope.cli.main import app
from gramscope.scale.sweep import EARLIER, LOGS, MANIFEST, RunState, open_folder, parse_grid, points, run_sweep
from gramscope.scale.sweep_engines import Engine, LocalEngine, Started, open_engine
from gramscope.store import RunWriter, find_runs

CONFIG = """
[model]
width = 4
depth = 1
[train]
steps = 2
[watch]
every = 2
probe = 1
measures = "loss"
"""
# A run without torch, so that tests of the scheduling take no seconds: it fails as often as its file says.
FAKE = """
import sys, pathlib
from gramscope.store import RunWriter
folder, fails = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
left = int(fails.read_text()) if fails.exists() else 0
with RunWriter.create(folder) as writer:
    writer.append(0, {"loss": 1.0})
    if left:
        fails.write_text(str(left - 1))
        print('{"error": "the loss is not finite"}')
        sys.exit(2)
"""


def fake(tmp_path):
    """A command for each point, and where to write how often a run is to fail."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    (tmp_path / "fails").mkdir()
    return lambda point, folder: [sys.executable, str(script), str(folder), str(tmp_path / "fails" / point.name)]


def sweep(tmp_path, command, grid, **options):
    told = []
    out = tmp_path / "sweep"
    found = run_sweep(out, points(grid), command, LocalEngine(2), tell=told.append, **options)
    return out, found, told


# Grids --------------------------------------------------------------------------------------------


def test_points_are_all_combinations_with_names_of_their_own():
    grid = {"optimiser.lr": [0.1, 1e-5], "model.name": ["mlp"], "data.name": ["digits", "mnist"]}
    found = points(grid)
    assert [point.name for point in found][:2] == [
        "lr-0.1_model.name-mlp_data.name-digits",
        "lr-0.1_model.name-mlp_data.name-mnist",
    ]
    assert len({point.name for point in found}) == 4
    assert found[-1].settings == {"optimiser.lr": 1e-5, "model.name": "mlp", "data.name": "mnist"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "a sweep must vary something"),
        (["lr"], "takes KEY=VALUE"),
        (["lr=0.1,,0.2"], "empty"),
        (["lr=0.1", "lr=0.2"], "lr comes twice"),
        (["lr=0.1,0.10"], "different values, but 0.1 comes twice"),
        (["lr=[1]"], "must be a number, true, false or a word, got a list"),
        (["lr=1 2"], "cannot be read"),
    ],
)
def test_grids_that_cannot_be_read(given, message):
    with pytest.raises(InputError, match=message):
        parse_grid(given)


def test_a_folder_belongs_to_one_sweep_whose_grid_may_grow(tmp_path):
    out, config = tmp_path / "s", {"model": {"width": 4}}
    open_folder(out, config, {"optimiser.lr": [0.1]})
    open_folder(out, config, {"optimiser.lr": [0.2]})
    assert json.loads((out / MANIFEST).read_text())["grid"] == {"optimiser.lr": [0.2, 0.1]}
    with pytest.raises(InputError, match=r"over optimiser\.lr, which is not one over model\.width"):
        open_folder(out, config, {"model.width": [1]})
    with pytest.raises(InputError, match=r"model\.width was 4 and is 8"):
        open_folder(out, {"model": {"width": 8}}, {"optimiser.lr": [0.1]})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="holds other files"):
        open_folder(tmp_path / "full", config, {"optimiser.lr": [0.1]})
    (out / MANIFEST).write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        open_folder(out, config, {"optimiser.lr": [0.1]})


# Scheduling ---------------------------------------------------------------------------------------


def test_failures_are_recorded_retried_and_put_aside_and_done_runs_are_not_done_again(tmp_path):
    command = fake(tmp_path)
    (tmp_path / "fails" / "lr-2").write_text("1")
    (tmp_path / "fails" / "lr-3").write_text("5")
    out, found, told = sweep(tmp_path, command, {"lr": [1, 2, 3]}, jobs=2, retries=1)
    assert [(run.name, run.state, run.attempts) for run in found] == [
        ("lr-1", "done", 1),
        ("lr-2", "done", 2),
        ("lr-3", "failed", 2),
    ]
    assert found[2].error == "the loss is not finite"
    assert sum(state.state == "running" for state in told) == 5
    assert {path.name for path in (out / EARLIER).iterdir()} == {"lr-2.1", "lr-3.1"}, "nothing is deleted"
    assert [path.name for path in find_runs(out)] == ["lr-1", "lr-2", "lr-3"], (
        "earlier attempts are no runs of the sweep"
    )
    (tmp_path / "fails" / "lr-3").write_text("0")
    before = (out / "lr-1" / "meta.json").stat().st_mtime_ns
    _, again, told = sweep(tmp_path, command, {"lr": [1, 2, 3, 4]}, jobs=2, retries=0)
    assert [(run.state, run.attempts) for run in again] == [("done", 1), ("done", 2), ("done", 3), ("done", 1)]
    assert {state.name for state in told} == {"lr-3", "lr-4"}
    assert (out / "lr-1" / "meta.json").stat().st_mtime_ns == before


def test_a_command_that_makes_no_run_has_failed(tmp_path):
    _, found, _ = sweep(tmp_path, lambda point, folder: [sys.executable, "-c", "print('bye')"], {"lr": [1]}, retries=0)
    assert (found[0].state, found[0].error) == ("failed", "bye")


def test_a_run_that_another_process_still_writes_is_left_alone(tmp_path):
    command = fake(tmp_path)
    with RunWriter.create(tmp_path / "sweep" / "lr-1"):
        _, found, _ = sweep(tmp_path, command, {"lr": [1, 2]})
        assert [run.state for run in found] == ["busy", "done"]
    _, found, _ = sweep(tmp_path, command, {"lr": [1, 2]})
    assert [run.state for run in found] == ["done", "done"]


def test_a_killed_sweep_goes_on(tmp_path):
    """kill -9 in the middle of a run: what was done stays done, the rest is run by the next call."""
    script = f"""
import sys
from pathlib import Path
from gramscope.scale.sweep import run_sweep
from gramscope.scale.sweep_engines import LocalEngine
from gramscope.scale.sweep import points
def command(point, folder):
    if point.name == "lr-2":
        return [sys.executable, "-c", "import time; time.sleep(3)"]
    return [sys.executable, {str(tmp_path / "fake.py")!r}, str(folder), "none"]
run_sweep(Path({str(tmp_path / "sweep")!r}), points({{"lr": [1, 2]}}), command, LocalEngine(1))
"""
    command = fake(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", script])
    state = tmp_path / "sweep" / ".state" / "lr-2.json"
    deadline = time.monotonic() + 300  # on a busy machine Python alone takes a minute to start
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert RunState(**json.loads(state.read_text())).state == "running"
    _, found, told = sweep(tmp_path, command, {"lr": [1, 2]})
    assert [(run.state, run.attempts) for run in found] == [("done", 1), ("done", 2)]
    assert {run.name for run in told} == {"lr-2"}


def test_an_interrupt_stops_the_runs_and_says_so(tmp_path):
    def tell(state):
        if state.state == "running":
            begun.append(state.name)
        if len(begun) == 2:
            raise KeyboardInterrupt

    begun = []
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tmp_path, points({"lr": [1, 2]}), lambda point, folder: command, LocalEngine(2), jobs=2, tell=tell)
    assert time.monotonic() - begin < 30
    assert json.loads((tmp_path / ".state" / "lr-1.json").read_text())["error"] == "the sweep was stopped"


# Engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_other_engines_run_the_same_commands(tmp_path, name):
    pytest.importorskip(name, reason=f"{name} is an extra")
    if name == "ray" and "GRAMSCOPE_TEST_RAY" not in os.environ:
        pytest.skip("Ray takes half a minute to start: set GRAMSCOPE_TEST_RAY=1 to try it")
    command = fake(tmp_path)
    (tmp_path / "fails" / "lr-2").write_text("9")
    (tmp_path / "out").mkdir()
    engine = open_engine(name, tmp_path / "engine", 1, {})
    try:
        found = run_sweep(tmp_path / "out", points({"lr": [1, 2]}), command, engine, jobs=2, retries=0)
    finally:
        engine.close()
    assert [run.state for run in found] == ["done", "failed"]
    assert found[1].error == "the loss is not finite"


def test_engines_that_are_not_there_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="must be one of 'local', 'slurm'"):
        open_engine("condor", tmp_path, 1, {})
    with pytest.raises(InputError, match="--option is for the engines slurm"):
        open_engine("local", tmp_path, 1, {"timeout_min": 3})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(InputError, match=r"pip install gramscope\[scale\]"):
        open_engine("slurm", tmp_path, 1, {})
    monkeypatch.undo()
    pytest.importorskip("submitit", reason="submitit is an extra")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="no sbatch here"):
        open_engine("slurm", tmp_path, 1, {})
    with pytest.raises(InputError, match="--option has a name or value"):
        open_engine("submitit", tmp_path, 1, {"partitoin": 3})


# The command --------------------------------------------------------------------------------------


class InThisProcess(Engine):
    """An engine that calls ``gramscope run`` where torch is imported already; a process of its own takes 12 s."""

    def start(self, command, log):
        assert command[:3] == [sys.executable, "-m", "gramscope"]
        done = CliRunner().invoke(app, command[3:])
        log.write_text(done.output)
        return Started(lambda: done.exit_code, lambda: None)


def invoke(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    return path


def test_the_command_makes_runs_and_does_none_twice(config, tmp_path, monkeypatch):
    def with_a_folder(name, folder, jobs, options):
        folder.mkdir(parents=True, exist_ok=True)  # as submitit does, before there is a manifest
        return InThisProcess()

    monkeypatch.setattr("gramscope.cli.sweep_command.open_engine", with_a_folder)
    out = tmp_path / "sweep"
    first = invoke(config, "--grid", "lr=0.2", "train.seed=3", "--out", out, "--json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert [run["state"] for run in found["runs"]] == ["done"]
    runs = find_runs(out)
    assert [run.name for run in runs] == ["lr-0.2_seed-3"]
    meta = json.loads((runs[0] / "meta.json").read_text())
    assert meta["config"]["optimiser"]["lr"] == 0.2
    assert meta["config"]["train"]["seed"] == 3
    again = invoke(config, "--grid", "lr=0.2", "train.seed=3", "--out", out)
    assert again.exit_code == 0
    assert "1 of 1 runs done" in again.stdout
    assert len(list((out / LOGS).iterdir())) == 1, "nothing was run again"
    other = invoke(config, "--grid", "width=4,8", "--out", out)
    assert other.exit_code == 2
    assert "holds a sweep over optimiser.lr, train.seed" in other.output
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    refused = invoke(config, "--grid", "lr=0.2", "--out", tmp_path / "mine")
    assert "holds other files" in " ".join(refused.output.split())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"], "no engine has begun there"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "lrr=0.1"], "lrr is no key of the config. Did you mean optimiser.lr"),
        (["--grid", "name=mlp,cnn"], "must say which section it means: data.name or model.name"),
        (["--grid", "lr=fast"], "optimiser.lr must be one finite number at least 0, got 'fast'"),
        (["--grid", "width=4,many"], "model.width must be a whole number of at least 1, got 'many'"),
        (["--grid", "model.heads=4"], "model.heads is no key that fits this model"),
        (["--grid", "out=a,b"], "watch.out, which the sweep sets"),
        (["--grid", "lr=0.1", "--set", "watch.measures=speed"], "measures must name some of loss"),
        (["--grid", "lr=0.1", "--set", "watch.layers=head.*"], "layers must"),
        (["--grid", "lr=0.1", "--engine", "condor"], "--engine must be one of"),
        (["--grid", "lr=0.1", "optimiser.lr=0.2"], "optimiser.lr comes twice"),
        ([], "a sweep must vary something"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(config, tmp_path, arguments, message):
    found = invoke(config, *arguments, "--out", tmp_path / "sweep")
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
    assert not (tmp_path / "sweep").exists()
