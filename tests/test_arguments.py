"""Argument names of all public callables are from one list, docs/arguments.md, which says what each of them means."""

import dataclasses
import importlib
import inspect
import re
from collections import defaultdict
from pathlib import Path

import gramscope as gs

PAGE = Path(__file__).parents[1] / "docs" / "arguments.md"
# Other words for what has a name already.
SYNONYMS = {
    "tolerance": "tol", "eps": "tol", "rtol": "tol", "centred": "center", "centered": "center", "centre": "center",
    "optimiser": "optimizer", "eta": "lr", "step_size": "lr", "rng": "seed", "generator": "seed", "net": "model",
    "num_classes": "classes", "n_classes": "classes", "top_k": "k", "n_examples": "n",
}  # fmt: skip
NOT_PACKAGES = {"base", "capture"}  # base is ours alone; capture is a function and a package


def public_callables():
    """Functions, methods and constructors by dotted name; fields of result classes are no arguments."""
    found = {}
    for name in gs.__all__:
        value = getattr(gs, name)
        if inspect.ismodule(value) and name not in NOT_PACKAGES:
            package = importlib.import_module(f"gramscope.{name}")
            found |= {f"{name}.{inner}": getattr(package, inner) for inner in package.__all__}
        elif callable(value):
            found[name] = value
    for name, value in list(found.items()):
        if inspect.isclass(value):
            del found[name]
            if value.__module__.startswith("gramscope."):
                found |= {f"{name}.{inner}": method for inner, method in methods(value).items()}
    return {name: value for name, value in found.items() if callable(value)}


def methods(cls):
    found = {}
    for name, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        made_by_dataclass = name == "__init__" and dataclasses.is_dataclass(cls)
        if inspect.isfunction(plain) and (not name.startswith("_") or name == "__init__") and not made_by_dataclass:
            found[name] = plain
    return found


def arguments():
    uses = defaultdict(list)
    for name, value in public_callables().items():
        for parameter in inspect.signature(value).parameters:
            if parameter not in ("self", "cls"):
                uses[parameter].append(name)
    return uses


def documented():
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_every_argument_has_a_meaning():
    listed = documented()
    assert len(listed) == len(set(listed)), "an argument has two rows"
    uses = arguments()
    missing = {name: where[:3] for name, where in uses.items() if name not in listed}
    assert not missing, f"give these a row in docs/arguments.md, or the name that the page already has: {missing}"
    unused = set(listed) - set(uses)
    assert not unused, f"no public callable has these arguments of docs/arguments.md: {unused}"


def test_no_second_word_for_one_thing():
    uses = arguments()
    found = {name: where for name, where in uses.items() if name in SYNONYMS}
    assert not found, {name: f"{where} should say {SYNONYMS[name]}" for name, where in found.items()}


def test_scikit_learn_words_stay_in_estimators():
    uses = arguments()
    for word in ("random_state", "learning_rate", "X"):
        assert all("Regressor" in where for where in uses[word]), (word, uses[word])
