"""Pages of the API reference, one for each package: every name that the package lists in `__all__`, and no other."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import gramscope

PACKAGES = {
    "gramscope": "The names most people need, as `gs.name`.",
    "capture": "Inputs and backward signals of every weight, from one forward and one backward pass.",
    "kernels": "The tangent kernel, exact or matrix-free, and how it moves under a step.",
    "hierarchy": "Layerwise Gram metrics of ReLU networks, pullback operators and explained steps.",
    "measures": "Numbers and curves that say how a network learns.",
    "propagators": "The tangent kernel of all hidden states.",
    "theory": "Finite-width recursions, criticality and nearly-kernel machines.",
    "spectra": "Eigenvalue densities, tail fits and ranks of weights.",
    "linalg": "Linear operators, solvers and trace estimators.",
    "record": "What `gs.watch` measures, and how to add a measurement.",
    "diagnose": "What is wrong with a recorded run, and what to try.",
    "report": "The page about one or many runs.",
    "scale": "Kernels on disk, sketches of gradients.",
    "store": "Run folders: writing, reading, checking.",
    "tasks": "Small data sets and networks that ship with the package.",
}


def public_names(package: str) -> list[str]:
    """Functions and classes of a package, by the name to use: `gramscope.ntk` rather than `gramscope.kernels.ntk`."""
    module = import_module("gramscope" if package == "gramscope" else f"gramscope.{package}")
    short = {id(getattr(gramscope, name)): f"gramscope.{name}" for name in gramscope.__all__}
    values = {name: getattr(module, name) for name in module.__all__ if name[0] != "_"}
    return [
        short.get(id(value), f"{module.__name__}.{name}")
        for name, value in values.items()
        if callable(value) and not isinstance(value, ModuleType)
    ]


def page(package: str) -> str:
    title = package if package == "gramscope" else f"gramscope.{package}"
    names = [f"   {name}" for name in public_names(package)]
    head = [title, "=" * len(title), "", PACKAGES[package].replace("`", "``"), ""]
    return "\n".join([*head, ".. autosummary::", "   :toctree: names", "   :nosignatures:", "", *names, ""])


def index() -> str:
    """The packages with a line each; a name is found by the search, or on the page of its package."""
    head = ["API reference", "=============", "", "Every public name, by package. The search finds a name too."]
    rows = [f":doc:`{name}`\n   {said.replace('`', '``')}" for name, said in PACKAGES.items()]
    tree = [".. toctree::", "   :hidden:", "   :maxdepth: 1", "", *(f"   {name}" for name in PACKAGES)]
    return "\n".join([*head, "", *rows, "", *tree, ""])


def write_reference(folder: Path) -> None:
    """Pages that have not changed keep their time, so that Sphinx builds only what is new; names that are gone go."""
    assert set(PACKAGES) - {"gramscope"} <= set(gramscope.__all__), "a package has gone: see PACKAGES"
    folder.mkdir(exist_ok=True)
    for name, text in {"index": index(), **{name: page(name) for name in PACKAGES}}.items():
        file = folder / f"{name}.rst"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
    listed = {name for package in PACKAGES for name in public_names(package)}
    for old in (folder / "names").glob("*.rst"):
        if old.stem not in listed:
            old.unlink()
