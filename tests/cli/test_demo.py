"""The command line: fast help, and a demo that trains, prints and writes its page."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import gramscope as gs
from gramscope.cli.main import app


def test_the_demo_compares_rich_and_lazy_and_names_its_page(tmp_path):
    arguments = ["demo", "--out", str(tmp_path / "page"), "--steps", "12", "--width", "16"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = " ".join(re.sub("│", " ", result.output).split())  # lines of a box
    for words in (
        "rich",
        "lazy",
        "kernel drift",
        "share of layer 6",
        "In words",
        "5% of the time by default",
        "report.html",
    ):
        assert words in printed
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if line[:1] in tuple("┏┃┡│└╭╰"))
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    for name in ("rich", "lazy"):
        assert len(gs.open_run(tmp_path / "page" / "runs" / name).scalars()) == 13


def test_the_demo_separates_the_regimes_in_every_measure_it_shows(tmp_path):
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    rich, lazy = (json.loads(done.stdout)["runs"][name] for name in ("rich", "lazy"))
    for key in ("kernel/drift", "kernel/alignment", "target_linearity/6", "step/error", "share/0", "share/2"):
        assert rich[key] > 1.2 * lazy[key], key
    for key in ("richness", "richness/initial_similarity", "share/6"):
        assert lazy[key] > 1.2 * rich[key], key
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The run is rich: it changed its features" in text
    assert "The run is lazy: its features hardly moved" in text


def test_the_demo_touches_nothing_that_is_there(tmp_path):
    """Neither an earlier demo, which may hold notes, nor a folder of anything else: it takes the next free name."""
    mine = tmp_path / "demo" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("years of work")
    arguments = ["demo", "--out", str(tmp_path / "demo"), "--steps", "1", "--width", "4", "--json"]
    for name in ("demo-2", "demo-3"):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["report"] == str(tmp_path / name / "report.html")
        assert len(gs.open_run(tmp_path / name / "runs" / "rich").steps) == 2
    assert mine.read_text() == "years of work"
    assert [path.name for path in mine.parent.iterdir()] == ["thesis.tex"]


def test_the_demo_tells_before_training_that_it_cannot_write(tmp_path, monkeypatch):
    monkeypatch.setattr("gramscope.cli.demo.train", lambda *_, **__: pytest.fail("trained first"))
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "not here")))
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "x")])
    assert done.exit_code == 2
    assert "not here" in done.output


def test_help_and_import_do_not_load_torch():
    code = "import sys, gramscope, gramscope.cli.main; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_an_unknown_name_is_explained():
    code = "import gramscope; gramscope.nonsense"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "gramscope has no 'nonsense'; it has" in done.stderr


def test_the_version():
    printed = CliRunner().invoke(app, ["--version"]).output
    assert printed.startswith(f"gramscope {gs.__version__}\n")
    assert f"torch {torch.__version__}\n" in printed
    assert "CUDA " in printed
