"""Where a public name is shown at work: in its docstring, in that of what returns it or contains it, or on a page."""

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from api_reference import PACKAGES, public_names

import gramscope

DOCS = Path(__file__).parent


@cache
def every_name() -> dict[str, typing.Any]:
    """Each public name with its value, once."""
    return {name: eval(name, {"gramscope": gramscope}) for package in PACKAGES for name in public_names(package)}


def has_example(value: typing.Any) -> bool:
    """Does its docstring, or that of one of its methods, have lines to type?"""
    members = vars(value).values() if inspect.isclass(value) else ()
    return any(">>>" in (inspect.getdoc(one) or "") for one in (value, *members))


@cache
def makers() -> dict[str, list[str]]:
    """Public class to the public names that return it, or that have it as a part."""
    found: dict[str, list[str]] = {}
    for name, value in every_name().items():
        for made in set(_classes_of(value)):
            if made != name:
                found.setdefault(made, []).append(name)
    return found


def _classes_of(value: typing.Any) -> Iterator[str]:
    """Public classes in what a function returns, or in what the fields and methods of a class are or return."""
    if not inspect.isclass(value):
        yield from _named_in(_returned(value))
        return
    for annotation in (*inspect.get_annotations(value).values(), *getattr(value, "__orig_bases__", ())):
        yield from _named_in(annotation)
    for name, member in vars(value).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if callable(member) and (not name.startswith("_") or name in ("__getitem__", "__iter__")):
            yield from _named_in(_returned(member))


def _returned(function: Callable[..., typing.Any]) -> typing.Any:
    try:
        return inspect.signature(function).return_annotation
    except ValueError:
        return None


def _named_in(annotation: typing.Any) -> Iterator[str]:
    if isinstance(annotation, str):
        words = set(re.findall(r"\w+", annotation))
        yield from (name for name, value in every_name().items() if inspect.isclass(value) and value.__name__ in words)
    for part in typing.get_args(annotation):
        yield from _named_in(part)
    yield from (name for name, value in every_name().items() if value is annotation)


@cache
def code_of_pages() -> dict[str, str]:
    """Page to all code on it: of notebooks their cells, of other pages what stands between backticks."""
    found = {}
    for path in sorted(DOCS.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found[f"notebooks/{path.stem}"] = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    for path in sorted(DOCS.glob("*.md")):
        found[path.stem] = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", path.read_text(encoding="utf-8"), re.DOTALL))
    return found


def pages(name: str) -> list[str]:
    """Pages with code that calls the name: as the last part of a dotted one, or before a bracket."""
    short = re.escape(name.rpartition(".")[2])
    called = re.compile(rf"(?<!def )(?<![\w.]){short}\(|gs(\.\w+)*\.{short}\b")
    return [page for page, code in code_of_pages().items() if called.search(code)]


def lines(name: str) -> list[str]:
    """What the reference says below the docstring of a public name."""
    made, shown = makers().get(name, []), pages(name)[:6]
    said = []
    if made:
        roles = [f":{'class' if inspect.isclass(every_name()[one]) else 'func'}:`{one}`" for one in made[:6]]
        said += ["", "Returned by, or part of: " + ", ".join(roles) + "."]
    if shown:
        said += ["", "Pages that use it: " + ", ".join(f":doc:`/{page}`" for page in shown) + "."]
    return said


def without_example() -> list[str]:
    """Public names that are shown at work nowhere."""
    shown = {name for name, value in every_name().items() if has_example(value) or pages(name)}
    reached = shown | {made for made, by in makers().items() if set(by) & shown}
    reached |= {made for made, by in makers().items() if set(by) & reached}  # parts of what a function returns
    return [name for name in every_name() if name not in reached]
