"""A sweep: a grid of settings and one run for each point, side by side, retried where they fail, and not done twice."""

import itertools
import json
import re
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.scale.sweep_engines import Engine, Started
from gramscope.store.files import Disk
from gramscope.store.folders import free_folder, is_run
from gramscope.store.lock import WriterLock
from gramscope.store.names import file_name
from gramscope.store.store_errors import StoreError, disk_trouble

MANIFEST, VERSION = "sweep.json", 1
# Not looked at by readers of runs, because their names begin with a dot.
STATES, LOGS, EARLIER, ENGINE_FILES = ".state", ".logs", ".earlier", ".engine"
POLL_SECONDS = 0.1
Value = str | int | float | bool
State = Literal["waiting", "running", "done", "failed", "busy"]


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
        grid[key] = [_value(key, part.strip()) for part in listed.split(",")]
        for place, value in enumerate(grid[key]):
            if value in grid[key][:place]:
                raise InputError(f"--grid {key} must have different values, but {value} comes twice.")
    if not grid:
        raise InputError("a sweep must vary something, but no grid was given. Pass e.g. --grid lr=1e-3,1e-2.")
    return grid


def _value(key: str, text: str) -> Value:
    if not text:
        raise InputError(f"--grid {key} must have a value between any two commas, got an empty one.")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text if re.fullmatch(r"[\w./+-]+", text) else None  # a bare word is a string
    if not isinstance(value, str | int | float | bool):
        got = "" if value is None else f", got a {type(value).__name__}"
        raise InputError(f"--grid {key}={text} cannot be read: it must be a number, true, false or a word{got}.")
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
    manifest = check_folder(out, config, grid)
    with disk_trouble(f"opening the sweep {out}"):
        out.mkdir(parents=True, exist_ok=True)
        Disk().write_whole(out / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")


def check_folder(out: Path, config: JSONObject, grid: Mapping[str, Sequence[Value]]) -> JSONObject:
    """The manifest that :func:`open_folder` writes; refuses a folder of something else, and writes nothing.

    An engine's own files do not count: submitit makes its folder before there is a manifest.
    """
    path = out / MANIFEST
    # Through JSON, so that it is compared with what was written.
    manifest = json.loads(json.dumps({"kind": "gramscope sweep", "version": VERSION, "config": config, "grid": grid}))
    with disk_trouble(f"opening the sweep {out}"):
        if path.exists():
            _check_same(path, manifest)
        elif out.exists() and (not out.is_dir() or any(entry.name != ENGINE_FILES for entry in out.iterdir())):
            raise InputError(
                f"--out must be a new or empty folder, or that of this sweep, but {out} holds other files."
            )
    return manifest


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


@dataclass(frozen=True)
class RunState:
    """How far a run of a sweep is; ``attempts`` of all calls together, ``error`` is the last line of its output.

    "busy" is a run that a process of an earlier call is still writing.
    """

    name: str
    state: State
    attempts: int = 0
    seconds: float = 0.0
    error: str = ""


def run_sweep(
    out: Path, points: Sequence[Point], command: Callable[[Point, Path], Sequence[str]], engine: Engine, *,
    jobs: int = 1, retries: int = 1, tell: Callable[[RunState], object] = lambda state: None,
    complete: Callable[[Path], bool] = is_run,
) -> list[RunState]:  # fmt: skip
    """Run ``command(point, folder)`` for each point that is not done, ``jobs`` at a time; returns the state of each.

    A run that fails is tried ``retries`` times more in this call. What a failed or killed attempt has written is moved
    to a hidden folder of ``out``, never deleted. ``tell`` is called whenever a run changes its state. An interrupt
    stops the running commands; a call with the same folder goes on. ``complete(folder)`` says whether a command that
    ended has written what it must; that is a run directory, unless told otherwise.
    """
    sweep = _Sweep(out, command, engine, retries, tell, complete)
    with disk_trouble(f"writing to the sweep {out}"):
        for folder in (STATES, LOGS, EARLIER):
            (out / folder).mkdir(parents=True, exist_ok=True)
        sweep.begin(points)
        try:
            while sweep.waiting or sweep.running:
                sweep.look()
                while sweep.waiting and len(sweep.running) < jobs:
                    sweep.start(sweep.waiting.popleft())
                if sweep.running:
                    time.sleep(POLL_SECONDS)
        finally:
            sweep.stop()
    return [sweep.states[point.name] for point in points]


@dataclass
class _Sweep:
    """The runs that wait, those that run, and what is known of all of them; ``tried`` counts attempts of this call."""

    out: Path
    command: Callable[[Point, Path], Sequence[str]]
    engine: Engine
    retries: int
    tell: Callable[[RunState], object]
    complete: Callable[[Path], bool]
    waiting: deque[Point] = field(default_factory=deque)
    running: dict[str, tuple[Point, Started, float]] = field(default_factory=dict)
    states: dict[str, RunState] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)

    def begin(self, points: Sequence[Point]) -> None:
        for point in points:
            state = self._read(point.name)
            if state.state == "done" and self.complete(self.out / point.name):
                self.states[point.name] = state
            elif _is_written(self.out / point.name):
                self._note(replace(state, state="busy", error="another process is still writing it"), keep=False)
            else:
                self.states[point.name] = replace(state, state="waiting")
                self.waiting.append(point)

    def start(self, point: Point) -> None:
        state = self.states[point.name]
        self._put_aside(point.name, state.attempts)
        state = replace(state, state="running", attempts=state.attempts + 1, error="")
        self.tried[point.name] += 1
        folder, log = self.out / point.name, self.out / LOGS / f"{point.name}.{state.attempts}.txt"
        self._note(state)
        begun = time.monotonic()
        self.running[point.name] = point, self.engine.start(self.command(point, folder), log), begun

    def look(self) -> None:
        """Note the runs that have ended; those that failed wait again, if they may."""
        for name, (point, started, begun) in list(self.running.items()):
            code = started.exit_code()
            if code is None:
                continue
            del self.running[name]
            state = replace(self.states[name], seconds=round(time.monotonic() - begun, 2))
            if code == 0 and self.complete(self.out / name):
                self._note(replace(state, state="done"))
                continue
            error = _last_line(self.out / LOGS / f"{name}.{state.attempts}.txt") or f"it ended with code {code}"
            self._note(replace(state, state="failed", error=error))
            if self.tried[name] <= self.retries:
                self.waiting.append(point)

    def stop(self) -> None:
        for name, (_, started, _) in self.running.items():
            started.stop()
            self._note(replace(self.states[name], state="failed", error="the sweep was stopped"))

    def _note(self, state: RunState, keep: bool = True) -> None:
        self.states[state.name] = state
        if keep:
            text = json.dumps(asdict(state), indent=1)
            Disk(fsync=False).write_whole(self.out / STATES / f"{state.name}.json", text.encode() + b"\n")
        self.tell(state)

    def _read(self, name: str) -> RunState:
        path = self.out / STATES / f"{name}.json"
        if not path.exists():
            return RunState(name, "waiting")
        try:
            return RunState(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} must be the state of a run, but it is damaged ({error}). Remove it.") from error

    def _put_aside(self, name: str, attempts: int) -> None:
        """What an earlier attempt has written makes room for the next one."""
        folder = self.out / name
        if folder.exists():
            folder.rename(free_folder(self.out / EARLIER / f"{name}.{attempts}"))


def _is_written(folder: Path) -> bool:
    """Whether a process that lives holds the lock of a run."""
    if not is_run(folder):
        return False
    try:
        WriterLock(folder, Disk()).release()
    except StoreError:
        return True
    return False


def _last_line(log: Path) -> str:
    """The error of a failed run: what ``gramscope run --json`` says, or the last line of a traceback."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1].strip() if lines else ""
    try:
        return str(json.loads(last)["error"])
    except (ValueError, KeyError, TypeError):
        return last[:500]
