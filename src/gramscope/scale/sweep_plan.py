"""What a sweep is: a grid of settings, one run for each point, and the file that says so in its folder."""

import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.store.files import Disk
from gramscope.store.names import file_name
from gramscope.store.store_errors import disk_trouble

MANIFEST = "sweep.json"
VERSION = 1
Value = str | int | float | bool


@dataclass(frozen=True)
class Point:
    """One run of a sweep: the name of its folder, and its settings as ``section.key`` -> value."""

    name: str
    settings: Mapping[str, Value]


def parse_grid(given: Sequence[str]) -> dict[str, list[Value]]:
    """``["lr=1e-3,1e-2", "width=64,256"]`` as values by key.

    >>> parse_grid(["lr=1e-3,1e-2", "optimiser.name=sgd,adam"])
    {'lr': [0.001, 0.01], 'optimiser.name': ['sgd', 'adam']}
    """
    grid: dict[str, list[Value]] = {}
    for text in given:
        key, equals, listed = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"--grid takes KEY=VALUE,VALUE,..., got {text!r}.")
        if key in grid:
            raise InputError(f"--grid must name each key once, but {key} comes twice. Give all its values in one list.")
        values = [_value(key, part.strip()) for part in listed.split(",")]
        twice = [value for place, value in enumerate(values) if value in values[:place]]
        if twice:
            raise InputError(f"--grid {key} must have different values, but {twice[0]} comes twice.")
        grid[key] = values
    if not grid:
        raise InputError("a sweep must vary something, but no grid was given. Pass e.g. --grid lr=1e-3,1e-2.")
    return grid


def _value(key: str, text: str) -> Value:
    if not text:
        raise InputError(f"--grid {key} must have a value between any two commas, got an empty one.")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        if not re.fullmatch(r"[\w./+-]+", text):
            raise InputError(
                f"--grid {key}={text} cannot be read: a value is a number, true, false or a word."
            ) from None
        return text  # a bare word is a string
    if not isinstance(value, str | int | float | bool):
        raise InputError(f"--grid {key}={text} must be a number, true, false or a word, got a {type(value).__name__}.")
    return value


def points(grid: Mapping[str, Sequence[Value]]) -> list[Point]:
    """All combinations, the last key fastest. Names have the last part of each key, or all of it where two are alike.

    >>> [point.name for point in points({"optimiser.lr": [0.1, 0.2], "model.width": [8]})]
    ['lr-0.1_width-8', 'lr-0.2_width-8']
    """
    last = [key.rpartition(".")[2] for key in grid]
    short = {key: own if last.count(own) == 1 else key for key, own in zip(grid, last, strict=True)}
    found = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        found.append(Point(file_name("_".join(f"{short[key]}-{value}" for key, value in settings.items())), settings))
    return found


def open_folder(out: Path, config: JSONObject, grid: Mapping[str, Sequence[Value]]) -> None:
    """Write the manifest of a new sweep, or check that the folder holds this one; its grid may have grown.

    Config and keys must be the same: runs of another sweep in the same folder would be compared as if they were one.
    """
    path = out / MANIFEST
    manifest = {"kind": "gramscope sweep", "version": VERSION, "config": config, "grid": grid}
    # Through JSON, so that it is compared with what was written.
    manifest = json.loads(json.dumps(manifest))
    with disk_trouble(f"opening the sweep {out}"):
        if path.exists():
            _check_same(path, manifest)
        elif out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(
                f"--out must be a new or empty folder, or that of this sweep, but {out} holds other files."
            )
        out.mkdir(parents=True, exist_ok=True)
        Disk().write_whole(path, json.dumps(manifest, indent=1).encode() + b"\n")


def _check_same(path: Path, manifest: JSONObject) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        kind, config, grid = before["kind"], before["config"], before["grid"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} must be the file of a sweep, but cannot be read ({error!r}). Restore it.") from error
    if kind != manifest["kind"]:
        raise InputError(f"{path} must be the file of a sweep, but it is of another kind. Choose another --out.")
    if list(grid) != list(manifest["grid"]):
        raise InputError(
            f"{path.parent} holds a sweep over {', '.join(grid)}, which is not one over {', '.join(manifest['grid'])}. "
            "Choose another --out."
        )
    if config != manifest["config"]:
        raise InputError(
            f"{path.parent} holds a sweep of another config: {_first_difference(config, manifest['config'])}. Choose "
            "another --out, or go back to that config."
        )
    for key, values in grid.items():  # runs that are there stay part of the sweep
        manifest["grid"][key] = [*manifest["grid"][key], *(v for v in values if v not in manifest["grid"][key])]


def _first_difference(before: JSONObject, now: JSONObject) -> str:
    for section in dict.fromkeys([*before, *now]):
        old, new = before.get(section, {}), now.get(section, {})
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                return f"{section}.{key} was {old.get(key)!r} and is {new.get(key)!r}"
    return "their sections differ"
