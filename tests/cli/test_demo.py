"""The command line: fast help, and a demo that trains, prints and writes its page."""

import json
import subprocess
import sys

from typer.testing import CliRunner

import gramscope as gs
from gramscope.cli.main import app


def test_the_demo_compares_rich_and_lazy_and_names_its_page(tmp_path):
    arguments = ["demo", "--out", str(tmp_path / "page"), "--steps", "12", "--width", "16"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in ("rich", "lazy", "kernel drift", "share of layer 4", "In words", "report.html"):
        assert words in result.output
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    for name in ("rich", "lazy"):
        assert len(gs.open_run(tmp_path / "page" / "runs" / name).scalars()) == 13
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.output)["report"].endswith("report.html")
    assert (tmp_path / "page" / "runs" / "rich.previous").exists(), "an earlier demo is put aside, not overwritten"


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
    assert CliRunner().invoke(app, ["--version"]).output.startswith("gramscope 0.")
