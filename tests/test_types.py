"""What a type checker knows of gramscope: the type of every result, and no name that is not there."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gramscope as gs

pytest.importorskip("mypy", reason="mypy is not installed")
LAZY = ["gramscope", "gramscope.measures", "gramscope.scale", "gramscope.store", "gramscope.theory"]
USER = """\
import torch
import gramscope as gs

model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
reveal_type(gs.ntk(model, x))
reveal_type(gs.ntk(model, x, by_site=True))
reveal_type(gs.ntk(model, x, out="K"))
reveal_type(gs.kernel(model, x))
reveal_type(gs.capture(model, x))
reveal_type(gs.watch(model, (x, x)))
reveal_type(gs.explain_step(model, x, x, lr=0.1))
reveal_type(gs.report("runs/a"))
reveal_type(gs.open_run("runs/a"))
"""
TYPES = [
    "Tensor", "dict[str, torch._tensor.Tensor]", "TiledKernel", "Kernel", "Snapshot", "Scope", "ExplainedStep", "Path",
    "Run",
]  # fmt: skip


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """mypy's lines on a user's script that reveals results, names all public names, and misspells one of each room."""
    script = tmp_path_factory.mktemp("user") / "script.py"
    rooms = [(room, importlib.import_module(room)) for room in LAZY]
    named = [f"{room.replace('gramscope', 'gs', 1)}.{name}" for room, module in rooms for name in module.__all__]
    misspelt = [f"{room.replace('gramscope', 'gs', 1)}.nonsense" for room in LAZY]
    script.write_text(USER + "\n".join(["used: object"] + [f"used = {name}" for name in [*named, *misspelt]]) + "\n")
    root = Path(gs.__file__).parents[2]  # where mypy's settings and what it remembers are
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


def test_results_have_types(checked):
    revealed = [line.split('Revealed type is "')[1].rstrip('"') for line in checked if "Revealed type" in line]
    assert [re.sub(r"^[\w.]+\.(?=\w+$)", "", found) for found in revealed] == TYPES


def test_every_public_name_is_known_and_no_other(checked):
    errors = [line for line in checked if ": error:" in line]
    assert len(errors) == len(LAZY), errors
    assert all('no attribute "nonsense"' in line for line in errors)
