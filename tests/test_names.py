"""A class, a file and a path mean one thing."""

import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

import gramscope as gs

SOURCE = Path(gs.__file__).parent
# Names that their packages still owe a new one.
OWED_CLASSES = {"Cut", "Estimate", "Evidence", "Finding", "Reading", "Series"}
OWED_FILES = {
    "alerts.py",
    "arguments.py",
    "judge.py",
    "lazy.py",
    "operator.py",
    "opening.py",
    "plots.py",
    "progress.py",
    "rates.py",
    "sweep.py",
}
OWED_PATHS = {
    "capture": {"capture"},  # the package is the function
    "diagnose": {"rule"},
    "kernels": {"dntk", "kernel", "ntk"},
    "linalg": {"conjugate_gradient", "lanczos", "xtrace"},
    "record": {"watch"},
    "spectra": {"analyze", "ranks", "rivals", "verdict"},
}
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def places(pattern):
    found = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(pattern, path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found[name].append(str(path.relative_to(SOURCE)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_class_name_occurs_twice():
    found = places(r"^class (\w+)")
    assert found.keys() <= OWED_CLASSES, found


def test_no_file_name_occurs_twice():
    found = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if not path.name.startswith("__"):
            found[path.name].append(str(path.relative_to(SOURCE)))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice.keys() <= OWED_FILES, twice


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_shares_its_path_with_a_public_name(package):
    """``import gramscope.measures.richness as r`` must not give a function in one place and a module in another."""
    public = getattr(importlib.import_module(f"gramscope.{package}"), "__all__", ())
    assert {name for name in public if (SOURCE / package / f"{name}.py").exists()} <= OWED_PATHS.get(package, set())
