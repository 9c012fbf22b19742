"""A call imports what it needs and nothing else: all libraries are installed, few are loaded."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fresh import run_after_torch

ROOT = Path(__file__).parents[1]
ALWAYS = {"numpy", "jaxtyping", "torch"}
LIBRARIES = [
    "torch", "numpy", "scipy", "pandas", "xarray", "safetensors", "sklearn", "threadpoolctl", "jaxtyping", "typer",
    "rich", "jinja2", "matplotlib", "lightning", "transformers",
]  # fmt: skip
START = "import gramscope as gs, torch\nnet, x = torch.nn.Linear(30, 20), torch.ones(4, 30)\n"
HELP = "import sys\nfrom gramscope.cli.main import app\nsys.argv = {arguments}\ntry: app()\nexcept SystemExit: pass"
WATCH = "gs.watch(net, probe=(x, torch.zeros(4, 20)), lr=0.1, loss=torch.nn.functional.mse_loss).close()"
CALLS = {
    "import gramscope": ("import gramscope", set()),
    "ntk": (START + "gs.ntk(net, x)", ALWAYS),
    "capture": (START + "gs.capture(net, x)", ALWAYS),
    "ntk to disk": (START + "import tempfile; gs.ntk(net, x, out=tempfile.mkdtemp()).to_tensor()", ALWAYS),
    "ntk_operator": (START + "gs.ntk_operator(net, x).dense()", ALWAYS),
    "explain_step": (START + "gs.explain_step(net, x, torch.zeros(4, 20), lr=0.1)", ALWAYS),
    "watch": (START + WATCH, ALWAYS | {"safetensors"}),
    "open_run": ("import gramscope as gs; gs.open_run", {"numpy", "safetensors"}),
    "report": ("import gramscope as gs; gs.report", {"numpy", "safetensors", "jinja2"}),
    "richness": (START + "gs.measures.richness(x + torch.eye(4, 30), x)", ALWAYS),
    "cka": (START + "gs.measures.cka(torch.eye(4), torch.eye(4))", ALWAYS),
    "esds": (START + "gs.spectra.esds(net)", ALWAYS),
    "alternatives": (
        START + "f = gs.spectra.fit_tail([1., 2., 4., 9.]); gs.spectra.alternatives([1., 2., 4., 9.], f)",
        ALWAYS | {"scipy"},
    ),
    "analyze": (START + "gs.spectra.analyze(net, workers=1)", ALWAYS | {"pandas", "scipy"}),
    "analyze in threads": (
        START + "gs.spectra.analyze({'a': net.weight, 'b': net.weight.T}, workers=2)",
        ALWAYS | {"pandas", "scipy", "threadpoolctl"},
    ),
    "states": (START + "gs.propagators.GlobalNTK(torch.nn.RNN(30, 3, batch_first=True), x[None])", ALWAYS),
    "traces": (START + "gs.linalg.xtrace(gs.linalg.Identity(9, dtype=x.dtype), 4).interval()", ALWAYS),
    "theory": (START + "gs.theory.FiniteWidthMLP([2, 4, 1], 'relu').flow(torch.eye(2))", ALWAYS),
    "tasks": (START + "gs.tasks.mlp((2, 3)), gs.tasks.parity(3)", ALWAYS),
    "--help": (HELP.format(arguments=["gramscope", "--help"]), {"typer", "rich"}),
    "analyze --help": (HELP.format(arguments=["gramscope", "analyze", "--help"]), {"typer", "rich"}),
}


def loaded(code, torch_first=False):
    code += f"\nimport sys\nprint('loaded:', *(name for name in {LIBRARIES} if name in sys.modules))"
    if torch_first:
        said, _ = run_after_torch(code)
    else:
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        said = run.stdout
    return set(said.strip().splitlines()[-1].split()[1:])


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_imported_that_the_call_does_not_need(name):
    code, needed = CALLS[name]
    assert loaded(code, torch_first="torch" in needed) <= needed


def test_the_check_above_sees_an_import():
    assert "pandas" in loaded("import pandas")
    assert "pandas" in loaded("import pandas", torch_first=True)
    assert "pandas" not in loaded("", torch_first=True)


def imported_libraries():
    """Top-level names of other packages that any file of gramscope imports, at its head or inside a function."""
    found = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"gramscope"}


def test_what_is_required_is_imported_and_the_other_way_round():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"scikit-learn": "sklearn"}
    required = {modules.get(name, name) for name in (one.split(">=")[0] for one in project["dependencies"])}
    assert required - imported_libraries() == set()
    # The trainers are imported by the callbacks that are for them, matplotlib by the pictures, Pillow by one form of
    # CIFAR-10: all are extras.
    extras = {"transformers", "lightning", "pytorch_lightning", "matplotlib", "PIL"}
    assert imported_libraries() - required <= extras
