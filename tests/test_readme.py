"""Every Python block of the README runs, in order, as one program."""

import re
import time
from pathlib import Path

import jaxtyping
import torch

import gramscope as gs
from gramscope.record.budget import Budget

README = Path(__file__).parents[1] / "README.md"


BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_first_example_fills_its_page(tmp_path, monkeypatch):
    """As a new user would run it: measurements from the start to the end, every loss, and a verdict."""
    monkeypatch.chdir(tmp_path)
    # The budget by the time of this process: other processes of a busy machine must not decide what is measured.
    monkeypatch.setattr(Budget, "clock", staticmethod(time.process_time))
    jaxtyping.config.update("jaxtyping_disable", True)  # users run without the checks of the test suite
    torch.manual_seed(0)
    try:
        exec(compile(BLOCKS[0], str(README), "exec"), {})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    run = gs.open_run("runs/a")
    frame = run.scalars()
    for name in ("kernel/drift", "richness", "share/0", "target_linearity/0", "loss/probe", "gradient_norm/0"):
        assert frame[name].notna().sum() >= 12, name
    for name in ("step/error", "delta_gram/0"):  # as many as a slow machine's seconds allow
        assert frame[name].notna().sum() >= 2, name
    assert (run.steps[0], run.steps[-1]) == (0, 40)
    assert list(run.logged()["loss"].index) == list(range(1, 41))
    assert run.failures().empty
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "There is not enough" not in page
    assert "The run is lazy" in page or "The run is rich" in page or "The run lies between" in page


def test_the_readme_runs(capsys, tmp_path, monkeypatch):
    assert len(BLOCKS) >= 3
    monkeypatch.chdir(tmp_path)  # it writes runs and a report
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "Snapshot of 8 examples" in printed
    assert "The step" in printed
    assert (tmp_path / "report.html").exists()
    assert names["K"].shape == (20, 1, 20, 1)
