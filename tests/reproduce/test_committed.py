"""The experiments of this repository: well-formed, committed tables as the code writes them, quick versions alive."""

import ast
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

import gramscope
from gramscope.reproduce.expected import UNPUBLISHED, read_expected
from gramscope.reproduce.experiments import (
    FIGURE_FILE,
    RESULT_FILE,
    TABLE_FILE,
    all_experiments,
    find_experiment,
    missing_need,
)
from gramscope.reproduce.running import OWN_COLUMNS, Options, run_experiment
from gramscope.reproduce.verdicts import judge
from gramscope.reproduce.writing import HEAD, MARKER, cells, hand_written, markdown_table, read_table, summary
from test_docs import module_of

ROOT = Path(__file__).parents[2] / "experiments"
with_table = module_of(ROOT.parent / "tools" / "findings_table.py").with_table
EXPERIMENTS = {one.name: one for one in all_experiments(ROOT)}
COMMITTED = [name for name, one in EXPERIMENTS.items() if (one.folder / RESULT_FILE).exists()]
PAGE = ROOT.parent / "docs" / "findings.md"
# Those that need no package or data that is not here; tails has a test of its own.
QUICK = [name for name, one in EXPERIMENTS.items() if name != "tails" and not missing_need(one.quick_needs)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_expected_values_are_of_cases_that_are_run(name):
    """Every published number names a case of the full grid, so that a misspelt one is not silently "not run"."""
    experiment = EXPERIMENTS[name]
    grid = experiment.load().cases(False)
    expected = read_expected(experiment.folder)
    assert expected
    for value in expected:
        fitting = [case for case in grid if all(case.get(key) == wanted for key, wanted in value.case.items())]
        assert fitting, f"{value} selects no case"
        assert value.why != UNPUBLISHED
    assert experiment.load().cases(True)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_only_public_names_are_used(name):
    """What a package lists in ``__all__``, imported or reached from ``gs``: an experiment is also an example."""
    used = []
    for node in ast.walk(ast.parse((EXPERIMENTS[name].folder / "run.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "gramscope":
            used += [(import_module(str(node.module)), alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gs":
            used.append((gramscope, node.attr))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in (f"gs.{one}" for one in gramscope.__all__):
            home = getattr(gramscope, ast.unparse(node.value).removeprefix("gs."))
            used += [(home, node.attr)] if isinstance(home, ModuleType) else []
    assert used
    for package, one in used:
        assert one in getattr(package, "__all__", ()), f"{package.__name__}.{one} is not public"


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_table_is_what_the_code_writes(name):
    experiment = EXPERIMENTS[name]
    table = read_table(experiment.folder / TABLE_FILE)
    grid = experiment.load().cases(False)
    keys = list(dict.fromkeys(key for case in grid for key in case))
    assert list(table.columns)[: len(keys) + len(OWN_COLUMNS)] == [*keys, *OWN_COLUMNS]
    for row in table[keys].itertuples(index=False):
        assert any(all(case.get(key) == value or value != value for key, value in zip(keys, row, strict=True))
                   for case in grid)  # fmt: skip
    text = (experiment.folder / RESULT_FILE).read_text(encoding="utf-8")
    verdicts = judge(table, read_expected(experiment.folder))
    if any(one.verdict == "not run" for one in verdicts):
        assert "not run" in hand_written(experiment.folder / RESULT_FILE).lower()
    assert summary(verdicts) in text
    for line in markdown_table(verdicts):
        assert line in text
    for word in ("command", "commit", "machine", "versions", "wall time"):
        assert f"- {word}: " in text
    assert MARKER in text
    tell = getattr(experiment.load(), "findings", None)
    assert tell is None or str(tell(table)).strip() in text
    assert hand_written(experiment.folder / RESULT_FILE).strip(), "a result has a text of its author"


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_figure_is_drawn_from_the_committed_table(name, tmp_path):
    """What a figure shows stands in the table: nobody needs the jobs to draw it again."""
    mpl = pytest.importorskip("matplotlib")
    from matplotlib import image

    mpl.use("Agg")
    folder = EXPERIMENTS[name].folder
    EXPERIMENTS[name].load().figure(read_table(folder / TABLE_FILE), tmp_path / FIGURE_FILE)
    drawn, committed = (image.imread(place / FIGURE_FILE) for place in (tmp_path, folder))
    # Byte by byte with one version of matplotlib and its fonts; another may move text by a pixel or two.
    assert np.abs(np.subtract(drawn.shape, committed.shape)).max() <= 4
    if drawn.shape == committed.shape:
        assert (np.abs(drawn - committed) > 0.05).any(-1).mean() < 0.01


def test_the_page_of_findings_holds_the_committed_numbers():
    """Run tools/findings_table.py after a result is published."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, ROOT) == page
    with pytest.raises(ValueError, match="must hold the lines"):
        with_table("no marker here", ROOT)


@pytest.mark.filterwarnings("default::UserWarning:gramscope")  # small versions may lie outside a theory's regime
@pytest.mark.parametrize("name", QUICK)
def test_the_quick_version_runs_without_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAMSCOPE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    experiment = find_experiment(ROOT, name)
    outcome = run_experiment(experiment, Options(True, 1, "cpu", 1), tmp_path / "out", Console(quiet=True))
    assert not outcome.failed, outcome.failed[0].error
    if name in COMMITTED:  # but for sizes in names, which are smaller
        assert _names(outcome.table) == _names(read_table(experiment.folder / TABLE_FILE))
    verdicts = judge(outcome.table, read_expected(experiment.folder))
    assert any(one.seeds == 1 for one in verdicts)
    assert all(len(cells(one)) == len(HEAD) for one in verdicts)
    experiment.load().figure(outcome.table, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def _names(table):
    return {re.sub(r"_\d+$", "", column) for column in table.columns}


def test_decay_explains_the_published_one(tmp_path):
    """In float32 what a plain script computes is rounding, and near 1; the true value is that of float64, near 0.5."""
    experiment = find_experiment(ROOT, "decay")
    case = {"decay": "found", "biases": True, "steps": "coarse"}
    found = {
        dtype: experiment.load().run({**case, "dtype": dtype}, 0, quick=True, device="cpu", out=tmp_path)
        for dtype in ("float32", "float64")
    }
    assert found["float64"]["D_LR_centred_end"] == pytest.approx(found["float32"]["D_LR_centred_end"], abs=0.05)
    assert found["float64"]["D_LR_unguarded_end"] < 0.7
    assert found["float32"]["D_LR_unguarded_end"] > 0.9
