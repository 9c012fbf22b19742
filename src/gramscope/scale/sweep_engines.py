"""Where the runs of a sweep are computed: processes of this machine, Slurm through submitit, or Ray.

An engine starts one command and can be asked whether it has ended. What the command does, and what becomes of its
result, is the same on all of them.
"""

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from gramscope.base.checks import check_choice
from gramscope.base.errors import InputError

ENGINES = ("local", "slurm", "submitit", "ray")


@dataclass(frozen=True)
class Started:
    """A command on its way: ``exit_code()`` is None while it runs, then what it returned; ``stop()`` ends it."""

    exit_code: Callable[[], int | None]
    stop: Callable[[], object]


class Engine(ABC):
    """Something that runs commands."""

    @abstractmethod
    def start(self, command: Sequence[str], log: Path) -> Started:
        """Begin ``command``; all that it prints goes to ``log``."""

    def close(self) -> None:  # noqa: B027
        """Give back what the engine holds."""


def open_engine(name: str, folder: Path, jobs: int, options: Mapping[str, object]) -> Engine:
    """``folder`` is for the engine's own files; ``options`` are those of submitit (timeout_min, slurm_partition, …)."""
    check_choice(name, "--engine", ENGINES)
    if options and name in ("local", "ray"):
        raise InputError(f"--option is for the engines slurm and submitit, got {next(iter(options))!r} for {name}.")
    if name == "local":
        return LocalEngine(jobs)
    if name == "ray":
        return RayEngine(jobs)
    return SubmititEngine(name, folder, options)


def run_command(command: Sequence[str], log: str, environment: Mapping[str, str]) -> int:
    """Run a command to its end, with its output in a file; what Slurm and Ray are given to do."""
    with open(log, "ab") as file:
        given = {**os.environ, **environment}
        return subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=given
        ).returncode


def _environment(jobs: int) -> dict[str, str]:
    """Threads for each of ``jobs`` processes on one machine, unless the user has said so."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return {"OMP_NUM_THREADS": str(max(1, cores // jobs))}


class LocalEngine(Engine):
    """Plain processes of this machine; the cores are shared out among them, or each gets ``threads`` threads."""

    def __init__(self, jobs: int, threads: int | None = None) -> None:
        self.environment = _environment(jobs) if threads is None else {"OMP_NUM_THREADS": str(threads)}

    def start(self, command: Sequence[str], log: Path) -> Started:
        with log.open("ab") as file:
            environment = {**os.environ, **self.environment}
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        return Started(process.poll, partial(_end, process))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()  # does nothing to one that has ended
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class SubmititEngine(Engine):
    """Jobs of Slurm, or with ``name="submitit"`` processes of this machine that submitit starts as it would there."""

    def __init__(self, name: str, folder: Path, options: Mapping[str, object]) -> None:
        submitit = _needed("submitit", name)
        if name == "slurm" and shutil.which("sbatch") is None:
            raise InputError(
                "--engine slurm must be called where Slurm is, but there is no sbatch here. Call it on a login node, "
                "or use --engine local."
            )
        self.executor = submitit.AutoExecutor(folder=folder, cluster="slurm" if name == "slurm" else "local")
        try:
            self.executor.update_parameters(**{"timeout_min": 24 * 60, **options})
        except (TypeError, ValueError, NameError) as error:
            raise InputError(f"--option has a name or value that submitit does not take: {error}") from error

    def start(self, command: Sequence[str], log: Path) -> Started:
        job = self.executor.submit(run_command, list(command), str(log), {})

        def exit_code() -> int | None:
            if not job.done():
                return None
            # A job that Slurm ended (time, memory, a lost node) has no result, but an exception.
            return int(job.result()) if job.exception() is None else 1

        return Started(exit_code, job.cancel)


class RayEngine(Engine):
    """Tasks of Ray: of the cluster that RAY_ADDRESS names, or of this machine."""

    def __init__(self, jobs: int) -> None:
        self.ray = _needed("ray", "ray")
        self.mine = not self.ray.is_initialized()
        if self.mine:
            address = os.environ.get("RAY_ADDRESS")
            cores = {} if address else {"num_cpus": jobs, "include_dashboard": False}
            self.ray.init(address=address, log_to_driver=False, logging_level="error", **cores)
        self.remote = self.ray.remote(num_cpus=1, max_retries=0)(run_command)

    def start(self, command: Sequence[str], log: Path) -> Started:
        paths = os.pathsep.join(path for path in sys.path if path)
        task = self.remote.remote(list(command), str(log.absolute()), {"PYTHONPATH": paths})

        def exit_code() -> int | None:
            done, _ = self.ray.wait([task], timeout=0)
            try:
                return int(self.ray.get(task)) if done else None
            except self.ray.exceptions.RayError:  # the worker or its machine died
                return 1

        return Started(exit_code, partial(self.ray.cancel, task, force=True))

    def close(self) -> None:
        if self.mine:
            self.ray.shutdown()


def _needed(package: str, engine: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise InputError(
            f"--engine {engine} needs the package {package}, which is not installed. Install it with pip install "
            f"gramscope[{'ray' if package == 'ray' else 'scale'}], or use --engine local."
        ) from error
