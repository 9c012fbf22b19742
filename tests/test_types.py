"""What a type checker knows of gramscope: the type of every result, and no name that is not there."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gramscope as gs

pytest.importorskip("mypy", reason="mypy is not installed")
PACKAGES = ["gramscope"] + [
    f"gramscope.{name}" for name in (
        "hierarchy", "kernels", "linalg", "measures", "propagators", "record", "scale", "spectra", "store", "tasks",
        "theory",
    )
]  # fmt: skip
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
    """mypy's lines on a user's script that reveals all public names, and misspells one of each package."""
    script = tmp_path_factory.mktemp("user") / "script.py"
    named = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    lines = [f"reveal_type({name.replace('gramscope', 'gs', 1)})  # {name}" for name in named]
    lines += [f"used = {package.replace('gramscope', 'gs', 1)}.nonsense" for package in PACKAGES]
    script.write_text(USER + "\n".join([*lines, ""]))
    root = Path(gs.__file__).parents[2]  # where mypy's settings and what it remembers are
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


def revealed(lines):
    return [line.split('Revealed type is "')[1].rstrip('"') for line in lines if "Revealed type" in line]


def test_results_have_types(checked):
    found = [re.sub(r"^[\w.]+\.(?=\w+$)", "", kind) for kind in revealed(checked)[: len(TYPES)]]
    assert found == TYPES


def test_no_public_name_is_any_and_no_function_returns_it(checked):
    untyped = [kind for kind in revealed(checked)[len(TYPES) :] if kind == "Any" or re.search(r"-> Any\b", kind)]
    assert not untyped


def test_every_public_name_is_known_and_no_other(checked):
    errors = [line for line in checked if ": error:" in line]
    assert len(errors) == len(PACKAGES), errors
    assert all('no attribute "nonsense"' in line for line in errors)
