"""Every function and every test that docs/sources.md names exists; every numbered equation of the sources is there."""

import re
from pathlib import Path

import pytest

import gramscope as gs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / name for name in ("sources.md", "sources-2.md") if (ROOT / "docs" / name).exists()]
NAMED = [(page.name, name) for page in PAGES for name in sorted(set(re.findall(r"`(gs\.[\w.]+)`", page.read_text())))]
TESTS = [
    (page.name, test) for page in PAGES for test in sorted(set(re.findall(r"`(tests/[\w/.:]+)`", page.read_text())))
]


def test_there_is_something_to_check():
    assert len(NAMED) > 50
    assert len(TESTS) > 40


@pytest.mark.parametrize("page", sorted({page for page, _ in NAMED}))
def test_functions_exist(page):
    missing = []
    for name in (name for own, name in NAMED if own == page):
        found = gs
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
    assert not missing, f"{page} names what gramscope does not have: {missing}"


@pytest.mark.parametrize("page", sorted({page for page, _ in TESTS}))
def test_tests_exist(page):
    missing = []
    for name in (name for own, name in TESTS if own == page):
        path, _, function = name.partition("::")
        there = (ROOT / path).exists()
        if not there or (function and f"def {function}(" not in (ROOT / path).read_text()):
            missing.append(name)
    assert not missing, f"{page} names tests that are not there: {missing}"


@pytest.mark.parametrize(
    ("source", "chapter", "last"), [("arXiv:2606.09744", "", 213), ("arXiv:2410.04264", "", 79), ("PDLT", r"11\.", 153)]
)
def test_every_equation_is_accounted_for(source, chapter, last):
    text = (ROOT / "docs" / "sources.md").read_text()
    section = text.split(f"## {source}")[1].split("\n## ")[0]
    numbers = set()
    for first, end in re.findall(rf"\({chapter}(\d+)\)(?: to \({chapter}(\d+)\))?", section):
        numbers |= set(range(int(first), int(end or first) + 1))
    assert set(range(1, last + 1)) - numbers == set()
    assert max(numbers) == last
