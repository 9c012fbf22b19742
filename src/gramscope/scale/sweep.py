"""Runs of a sweep, side by side: started, watched, retried where they fail, and not done twice."""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from gramscope.base.errors import InputError
from gramscope.scale.sweep_engines import Engine, Started
from gramscope.scale.sweep_plan import Point
from gramscope.store.files import Disk
from gramscope.store.folders import is_run
from gramscope.store.lock import WriterLock
from gramscope.store.store_errors import StoreError, disk_trouble

# Not looked at by readers of runs, because their names begin with a dot.
STATES, LOGS, EARLIER, ENGINE_FILES = ".state", ".logs", ".earlier", ".engine"
POLL_SECONDS = 0.1
State = Literal["waiting", "running", "done", "failed", "busy"]


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


@dataclass(frozen=True)
class SweepResult:
    """The state of every run, in the order of the grid."""

    runs: Sequence[RunState]

    def of(self, state: State) -> list[RunState]:
        return [run for run in self.runs if run.state == state]


def run_sweep(
    out: Path, points: Sequence[Point], command: Callable[[Point, Path], Sequence[str]], engine: Engine, *,
    jobs: int = 1, retries: int = 1, tell: Callable[[RunState], object] = lambda state: None,
    complete: Callable[[Path], bool] = is_run,
) -> SweepResult:  # fmt: skip
    """Run ``command(point, folder)`` for each point that is not done, ``jobs`` at a time; state is kept in ``out``.

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
    return SweepResult([sweep.states[point.name] for point in points])


class _Sweep:
    """The runs that wait, those that run, and what is known of all of them."""

    def __init__(
        self, out: Path, command: Callable[[Point, Path], Sequence[str]], engine: Engine, retries: int,
        tell: Callable[[RunState], object], complete: Callable[[Path], bool],
    ) -> None:  # fmt: skip
        self.out, self.command, self.engine, self.retries, self.tell = out, command, engine, retries, tell
        self.complete = complete
        self.waiting: deque[Point] = deque()
        self.running: dict[str, tuple[Point, Started, float]] = {}
        self.states: dict[str, RunState] = {}
        self.tried: dict[str, int] = {}  # in this call

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
        self.tried[point.name] = self.tried.get(point.name, 0) + 1
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
            place = self.out / EARLIER / f"{name}.{attempts}"
            count = 2
            while place.exists():
                place, count = place.with_name(f"{name}.{attempts}-{count}"), count + 1
            folder.rename(place)


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
