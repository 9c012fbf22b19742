"""``gramscope sweep``: ``gramscope run`` for every combination of a grid of settings."""

import difflib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.cli.config import KEYS, check_config, read_config, toml_value
from gramscope.scale.sweep import (
    ENGINE_FILES,
    Point,
    RunState,
    Value,
    check_folder,
    open_folder,
    parse_grid,
    points,
    run_sweep,
)
from gramscope.scale.sweep_engines import open_engine
from gramscope.store.files import Disk
from gramscope.store.store_errors import disk_trouble
from gramscope.tasks import Task

CONFIG_FILE = "config.toml"
OWN = "watch.out"  # set by the sweep, for each run
SHOWN_FAILURES = 5


def sweep_config(
    path: Path, grid: Sequence[str], changes: Sequence[str], *, out: Path, jobs: int, engine: str, retries: int,
    options: Sequence[str], quiet: bool = False,
) -> JSONObject:  # fmt: skip
    """Run what of the sweep is not done; returns the folder and the state of every run."""
    config = read_config(path, list(changes))
    values = _full_keys(parse_grid(grid), config)
    _check_points(path, list(changes), values)
    engine_options = _engine_options(options)
    todo = points(values)
    own = {section: {k: v for k, v in keys.items() if f"{section}.{k}" != OWN} for section, keys in config.items()}
    check_folder(out, own, values)
    opened = open_engine(engine, out / ENGINE_FILES, jobs, engine_options)  # before anything of ours is written
    try:
        open_folder(out, own, values)
        with disk_trouble(f"writing to the sweep {out}"):
            # The runs read this copy: a file that is edited meanwhile must not change half of them.
            Disk().write_whole(out / CONFIG_FILE, path.read_bytes())
        console, here = Console(quiet=quiet), out.absolute()  # other machines may start elsewhere
        with told("sweep", len(todo), console) as tell:
            found = run_sweep(here, todo, _command(here, changes), opened, jobs=jobs, retries=retries, tell=tell)
    finally:
        opened.close()
    _sum_up(found, out, console)
    return {"sweep": str(out), "runs": [asdict(run) for run in found]}


def _command(out: Path, changes: Sequence[str]) -> Callable[[Point, Path], list[str]]:
    def command(point: Point, folder: Path) -> list[str]:
        settings = [
            *changes,
            *(_setting(key, value) for key, value in point.settings.items()),
            _setting(OWN, str(folder)),
        ]
        sets = [part for setting in settings for part in ("--set", setting)]
        return [sys.executable, "-m", "gramscope", "run", str(out / CONFIG_FILE), *sets, "--json"]

    return command


def _setting(key: str, value: Value) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False)}"  # JSON's numbers, texts and booleans are TOML's too


def _full_keys(grid: Mapping[str, list[Value]], config: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Value]]:
    """``lr`` as ``optimiser.lr``: the last part of a key is enough where one section alone has it."""
    known = [f"{section}.{key}" for section in config for key in (*config[section], *KEYS.get(section, ()))]
    known = list(dict.fromkeys(known))
    found: dict[str, list[Value]] = {}
    for key, values in grid.items():
        full = key if "." in key else _only_one(key, known)
        if full == OWN:
            raise InputError(
                f"--grid must not have {OWN}, which the sweep sets for each run. Pass --out for all of them."
            )
        if full in found:
            raise InputError(
                f"--grid must name each key once, but {full} comes twice. Give all its values in one list."
            )
        found[full] = values
    return found


def _only_one(key: str, known: Sequence[str]) -> str:
    having = [name for name in known if name.partition(".")[2] == key]
    if len(having) == 1:
        return having[0]
    if having:
        raise InputError(f"--grid {key} must say which section it means: {' or '.join(having)}.")
    last = {name.partition(".")[2]: name for name in known}
    close = [last[name] for name in difflib.get_close_matches(key, last, n=2, cutoff=0.6)]
    advice = f"Did you mean {' or '.join(close)}?" if close else f"It may be {', '.join(known)}."
    raise InputError(f"--grid {key} is no key of the config. {advice} Keys that go to torch need their section.")


def _check_points(path: Path, changes: list[str], grid: Mapping[str, Sequence[Value]]) -> None:
    """Every value once, with the first of the others: what cannot be built is said before anything is trained."""
    first = {key: values[0] for key, values in grid.items()}
    tasks: dict[str, Task] = {}
    for key, values in grid.items():
        for value in values:
            settings = [_setting(name, v) for name, v in {**first, key: value}.items()]
            config = read_config(path, [*changes, *settings])
            data = json.dumps(config["data"], sort_keys=True, default=str)
            tasks[data] = check_config(config, tasks.get(data))


def _engine_options(given: Sequence[str]) -> JSONObject:
    found: JSONObject = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--option takes KEY=VALUE, got {text!r}.")
        found[key.strip()] = toml_value(value)
    return found


# What is printed ----------------------------------------------------------------------------------


@contextmanager
def told(label: str, total: int, console: Console) -> Iterator[Callable[[RunState], None]]:
    """A bar over all runs, and a line for each that ends."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    running: set[str] = set()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(label, total=total)
        ended: set[str] = set()

        def tell(state: RunState) -> None:
            (running.add if state.state == "running" else running.discard)(state.name)
            if state.state != "running":
                ended.add(state.name)
                what = f"{state.state} in {state.seconds:.1f} s" if not state.error else f"{state.state}: {state.error}"
                console.print(f"{state.name}: {what}", markup=False, highlight=False, soft_wrap=True)
            progress.update(bar, completed=len(ended - running), description=f"{label}, {len(running)} running")

        yield tell


def _sum_up(found: Sequence[RunState], out: Path, console: Console) -> None:
    done, others = ([run for run in found if (run.state == "done") is wanted] for wanted in (True, False))
    console.print(f"Sweep: [bold]{out}[/bold] ({len(done)} of {len(found)} runs done)", soft_wrap=True)
    for run in others[:SHOWN_FAILURES]:
        console.print(f"  {run.name}, {run.attempts} attempts: {run.error}", markup=False, soft_wrap=True)
    if len(others) > SHOWN_FAILURES:
        console.print(f"  and {len(others) - SHOWN_FAILURES} more; call the same command again to retry them.")
    if done:
        console.print(f"Now: gramscope report {shlex.quote(str(out))}", style="dim", markup=False, soft_wrap=True)
