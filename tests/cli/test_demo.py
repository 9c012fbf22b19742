"""The command line: fast help, and a demo that trains, prints and writes its page."""

import subprocess
import sys

from typer.testing import CliRunner

from gramscope.cli.main import app


def test_the_demo_tells_who_learns_and_names_its_page(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "page"), "--steps", "20", "--width", "16"])
    assert result.exit_code == 0, result.output
    for words in ("Who does the learning", "layer 4", "How the kernel moves", "In words", "report.html"):
        assert words in result.output
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "Who does the learning" in page
    assert "http" not in page.replace("http-equiv", "")  # offline: nothing is fetched


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
