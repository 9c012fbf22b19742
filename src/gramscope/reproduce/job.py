"""One job: a case with a seed, in a process of its own (``python -m gramscope.reproduce.job FILE``) or in this one."""

import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject, json_values
from gramscope.reproduce.experiments import Case, open_experiment
from gramscope.scale.sweep_engines import Engine, Started
from gramscope.store.files import Disk

JOB_RESULT = "result.json"


def is_complete(folder: Path) -> bool:
    return (folder / JOB_RESULT).is_file()


def write_plan(path: Path, experiment: Path, case: Case, seed: int, *, quick: bool, device: str, folder: Path) -> None:
    """What the process of a job is told."""
    plan = {"experiment": str(experiment.absolute()), "case": case, "seed": seed, "quick": quick, "device": device}
    text = json.dumps({**plan, "folder": str(folder.absolute())}, indent=1)
    Disk(fsync=False).write_whole(path, text.encode() + b"\n")


def run_job(path: Path, modules: dict[str, ModuleType] | None = None) -> None:
    """Compute what the plan at ``path`` says, and write ``result.json`` into its folder."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    loaded = modules if modules is not None else {}
    place = plan["experiment"]
    if place not in loaded:
        loaded[place] = open_experiment(Path(place)).load()
    folder = Path(plan["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    wall, cpu = time.monotonic(), time.process_time()
    numbers = loaded[place].run(
        dict(plan["case"]), plan["seed"], quick=plan["quick"], device=plan["device"], out=folder
    )  # fmt: skip
    found = {
        "case": plan["case"], "seed": plan["seed"], "numbers": _checked(numbers),
        "seconds": round(time.monotonic() - wall, 3), "cpu_seconds": round(time.process_time() - cpu, 3),
    }  # fmt: skip
    text = json.dumps(json_values(found), indent=1, allow_nan=False)
    Disk(fsync=False).write_whole(folder / JOB_RESULT, text.encode() + b"\n")


def _checked(numbers: object) -> dict[str, float]:
    if not isinstance(numbers, Mapping) or not numbers:
        raise InputError(f"run(...) must return its numbers by name, got {numbers!r}.")
    return {str(name): float(value) for name, value in numbers.items()}


def read_result(folder: Path) -> JSONObject:
    """A job's case, seed, numbers and seconds; NaN and infinity are numbers again."""
    found: JSONObject = json.loads((folder / JOB_RESULT).read_text(encoding="utf-8"))
    found["numbers"] = {name: float(value) for name, value in found["numbers"].items()}
    return found


class InThisProcess(Engine):
    """An engine that runs one job after another here, so that a short job does not pay for a new process."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}

    def start(self, command: Sequence[str], log: Path) -> Started:
        code = 0
        with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                run_job(Path(command[-1]), self.modules)
            except Exception:
                traceback.print_exc(file=file)
                code = 1
        return Started(lambda: code, lambda: None)


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
