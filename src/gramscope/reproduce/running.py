"""All jobs of an experiment, run or resumed, and the table of their numbers."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from rich.console import Console

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject, json_values
from gramscope.cli.sweep_command import told
from gramscope.reproduce.experiments import Case, Experiment, missing_need
from gramscope.reproduce.job import InThisProcess, is_complete, read_result, write_plan
from gramscope.reproduce.provenance import commit, machine, versions
from gramscope.scale.sweep import Point, RunState, run_sweep
from gramscope.scale.sweep_engines import LocalEngine
from gramscope.store.files import Disk
from gramscope.store.names import file_name
from gramscope.store.store_errors import disk_trouble

MANIFEST, PLANS = "reproduce.json", ".plans"
KIND = "gramscope reproduce"
SEED = "seed"
OWN_COLUMNS = (SEED, "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Options:
    """How an experiment is run."""

    quick: bool
    seeds: int
    device: str
    jobs: int
    only_write: bool = False  # run nothing: the result of the jobs that are done

    def command(self, name: str) -> str:
        """The command that repeats it."""
        parts = ["gramscope reproduce", name, *(["--quick"] if self.quick else []), f"--seeds {self.seeds}"]
        parts += [f"--device {self.device}"] if self.device != "cpu" else []
        return " ".join(parts + ([f"--jobs {self.jobs}"] if self.jobs > 1 else []))


@dataclass(frozen=True)
class Outcome:
    """The numbers of all jobs that ended well, those that did not, and what made them."""

    table: pd.DataFrame
    failed: Sequence[RunState]
    record: JSONObject


def run_experiment(experiment: Experiment, options: Options, out: Path, console: Console) -> Outcome:
    """Run the jobs that are not done in ``out``; the same call goes on where it was stopped."""
    missing = missing_need(experiment.quick_needs if options.quick else experiment.needs)
    if missing and not options.only_write:
        raise InputError(f"{experiment.name} needs {missing}, which is not on this machine. Put it there first.")
    cases = _cases(experiment, options.quick)
    points = [Point(_name(case, seed), {**case, SEED: seed}) for case in cases for seed in range(options.seeds)]
    with disk_trouble(f"writing to {out}"):
        record = _open(out, experiment, options)
        if options.only_write:
            states: Sequence[RunState] = [_state(out, point) for point in points]
        else:
            states = _run_and_note(experiment, options, out, points, record, console)
        table = _table([read_result(out / point.name) for point in points if is_complete(out / point.name)])
    return Outcome(table, [state for state in states if state.state != "done"], record)


def _state(out: Path, point: Point) -> RunState:
    done = is_complete(out / point.name)
    return RunState(point.name, "done" if done else "waiting", error="" if done else "not run")


def _run_and_note(
    experiment: Experiment, options: Options, out: Path, points: Sequence[Point], record: JSONObject,
    console: Console,
) -> Sequence[RunState]:  # fmt: skip
    """Run what is not done, and keep in the record what made it."""
    (out / PLANS).mkdir(exist_ok=True)
    before = {point.name for point in points if is_complete(out / point.name)}
    call, begun = _begin(out, record, options, experiment.name), time.monotonic()
    try:
        return _run(experiment, options, out, points, console)
    finally:
        done = {point.name for point in points if is_complete(out / point.name)}
        _end(out, record, {**call, "wall_seconds": round(time.monotonic() - begun, 1), "jobs": len(done - before)})


def _cases(experiment: Experiment, quick: bool) -> list[Case]:
    cases: list[Case] = experiment.load().cases(quick)
    for place, case in enumerate(cases):
        taken = [key for key in OWN_COLUMNS if key in case]
        if taken or case in cases[:place]:
            raise InputError(
                f"cases() of {experiment.name} must be different and must not have the keys {', '.join(OWN_COLUMNS)}, "
                f"got {case}."
            )
    return cases


def _name(case: Mapping[str, object], seed: int) -> str:
    return file_name("_".join([*(f"{key}-{value}" for key, value in case.items()), f"seed-{seed}"]))


def _run(
    experiment: Experiment, options: Options, out: Path, points: Sequence[Point], console: Console
) -> Sequence[RunState]:
    def command(point: Point, folder: Path) -> list[str]:
        plan = out / PLANS / f"{point.name}.json"
        case = {key: value for key, value in point.settings.items() if key != SEED}
        write_plan(
            plan, experiment.folder, case, int(point.settings[SEED]), quick=options.quick, device=options.device,
            folder=folder,
        )  # fmt: skip
        return [sys.executable, "-m", "gramscope.reproduce.job", str(plan.absolute())]

    engine = LocalEngine(options.jobs, threads=1) if options.jobs > 1 else InThisProcess()
    by_seed = sorted(points, key=lambda point: int(point.settings[SEED]))  # a call that is stopped has every case once
    with told(experiment.name, len(points), console) as tell:
        return run_sweep(
            out, by_seed, command, engine, jobs=options.jobs, retries=0, tell=tell, complete=is_complete
        )  # fmt: skip


def _table(results: Sequence[JSONObject]) -> pd.DataFrame:
    """One row for each job: its settings, seed, seconds, and its numbers."""
    rows = [
        {**found["case"], SEED: found["seed"], "seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"],
         **found["numbers"]}
        for found in results
    ]  # fmt: skip
    return pd.DataFrame(rows)


# What made it -------------------------------------------------------------------------------------


def _open(out: Path, experiment: Experiment, options: Options) -> JSONObject:
    """The record of the folder; a new one, or that of the same experiment, code, size and device."""
    path = out / MANIFEST
    now = {
        "kind": KIND, "experiment": experiment.name, "code": experiment.code, "quick": options.quick,
        "device": options.device,
    }  # fmt: skip
    if path.exists():
        record: JSONObject = json.loads(path.read_text(encoding="utf-8"))
        other = next((key for key in now if record.get(key) != now[key]), None)
        if other:
            raise InputError(
                f"{out} holds results with another {other} ({record.get(other)!r}, now {now[other]!r}). Choose another "
                "--out, or remove that folder."
            )
        return record
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out must be a new or empty folder, or that of this experiment, but {out} holds others.")
    out.mkdir(parents=True, exist_ok=True)
    record = {**now, "calls": []}
    _write(path, record)
    return record


def _begin(out: Path, record: JSONObject, options: Options, name: str) -> JSONObject:
    """Write this call into the record before it computes anything, so that a kill does not hide what made the jobs."""
    call: JSONObject = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"), "command": options.command(name), "commit": commit(),
        "machine": machine(options.device), "versions": versions(), "wall_seconds": None, "jobs": None,
    }  # fmt: skip
    _write(out / MANIFEST, {**record, "calls": [*record["calls"], call]})
    return call


def _end(out: Path, record: JSONObject, call: JSONObject) -> None:
    """Complete the entry of a call; one that computed nothing leaves none."""
    record["calls"] = [*record["calls"], call] if call["jobs"] else record["calls"]
    with suppress(OSError):  # where the disk is full, the error of the jobs is the one to show
        _write(out / MANIFEST, record)


def _write(path: Path, record: JSONObject) -> None:
    Disk(fsync=False).write_whole(path, json.dumps(json_values(record), indent=1).encode() + b"\n")
