"""Every Python block of the README runs, in order, as one program."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_runs(capsys, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)  # it writes runs and a report
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "Snapshot of 8 examples" in printed
    assert "The step" in printed
    assert (tmp_path / "report.html").exists()
    assert names["K"].shape == (20, 1, 20, 1)
