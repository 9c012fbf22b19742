"""A class, a file and a path mean one thing."""

import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

import gramscope as gs

SOURCE = Path(gs.__file__).parent
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def places(pattern):
    found = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(pattern, path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found[name].append(str(path.relative_to(SOURCE)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_class_name_occurs_twice():
    assert not places(r"^class (\w+)")


def test_no_file_name_occurs_twice():
    found = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if not path.name.startswith("__"):
            found[path.name].append(str(path.relative_to(SOURCE)))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert not twice


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_shares_its_path_with_a_public_name(package):
    """``import gramscope.measures.richness as r`` must not give a function in one place and a module in another."""
    public = getattr(importlib.import_module(f"gramscope.{package}"), "__all__", ())
    assert not {name for name in public if (SOURCE / package / f"{name}.py").exists()}


MOST_EQUAL = 10


def test_no_two_places_share_more_than_ten_equal_lines():
    """Blank lines do not count."""
    seen = {}
    for path in sorted(SOURCE.rglob("*.py")):
        lines = [(number, line.strip()) for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)]
        lines = [(number, line) for number, line in lines if line]
        for place in range(len(lines) - MOST_EQUAL):
            window = tuple(line for _, line in lines[place : place + MOST_EQUAL + 1])
            here = f"{path.relative_to(SOURCE)}:{lines[place][0]}"
            assert seen.setdefault(window, here) == here, f"{here} and {seen[window]} begin eleven equal lines"
