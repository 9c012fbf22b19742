"""The API reference has every public name of every package."""

import sys
from importlib import import_module
from inspect import isclass, ismodule
from pathlib import Path

import gramscope as gs

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import api_reference
import where_used


def test_every_package_has_its_page():
    packages = {name for name in gs.__all__ if hasattr(getattr(gs, name), "__path__")}
    assert packages - set(api_reference.PACKAGES) <= {"base"}  # errors and checks, which are listed at the top level


def test_every_public_name_is_on_a_page():
    for package in api_reference.PACKAGES:
        module = gs if package == "gramscope" else import_module(f"gramscope.{package}")
        listed = {id(eval(name, {"gramscope": gs})) for name in api_reference.public_names(package)}
        public = {name: getattr(module, name) for name in module.__all__ if not name.startswith("_")}
        functions = {name: value for name, value in public.items() if callable(value) and not ismodule(value)}
        missing = [name for name, value in functions.items() if id(value) not in listed]
        assert missing == []
        assert all(f"   {name}\n" in api_reference.page(package) for name in api_reference.public_names(package))


def test_every_public_name_says_what_it_is():
    bare = []
    for package in api_reference.PACKAGES:
        for name in api_reference.public_names(package):
            value = eval(name, {"gramscope": gs})
            own = vars(value).get("__doc__") if isclass(value) else value.__doc__  # a class would inherit it
            if not (own or "").strip() or (own or "").startswith(value.__name__ + "("):  # dataclasses write that
                bare.append(name)
    assert bare == []


def test_every_public_name_is_shown_at_work():
    """In its docstring, in that of what returns it or has it as a part, or in the code of a page."""
    assert where_used.without_example() == []


def test_a_name_without_an_example_would_be_found(monkeypatch):
    monkeypatch.setattr(where_used, "has_example", lambda value: False)
    monkeypatch.setattr(where_used, "pages", lambda name: [])
    assert where_used.without_example() == list(where_used.every_name())


def test_the_reference_names_what_returns_a_class_and_the_pages_of_a_function(monkeypatch):
    assert "gramscope.kernel" in where_used.makers()["gramscope.Kernel"]
    assert "gramscope.kernels.KinkCrossings" in where_used.makers()["gramscope.kernels.SiteCrossings"], "a part of it"
    assert "data-set-kernels" in where_used.pages("gramscope.ntk")
    monkeypatch.setattr(where_used, "code_of_pages", lambda: {"a": "`rule`, `my_rule(x)`", "b": "`@rule('x')`"})
    assert where_used.pages("gramscope.diagnose.rule") == ["b"], "a word that only looks alike does not count"
