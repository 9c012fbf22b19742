"""The API reference has every public name of every package."""

import importlib.util
from importlib import import_module
from inspect import isclass, ismodule
from pathlib import Path

import gramscope as gs

FILE = Path(__file__).parents[1] / "docs" / "api_reference.py"
spec = importlib.util.spec_from_file_location("api_reference", FILE)
api_reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api_reference)


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
