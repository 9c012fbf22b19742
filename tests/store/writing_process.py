"""A process that forks writers on demand, so that fifty of them cost one start of Python. Never imports torch.

Reads commands from its standard input, one JSON object a line, and answers each with the child's pid; the child reports
to the standard output what it is about to commit ("try") and what it has committed ("done").
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gramscope.store import Disk, RunWriter
from store.content import arrays_of, scalars_of


class DyingDisk(Disk):
    """Kills its own process at the n-th call; a dying write takes half of its bytes first."""

    def __init__(self, die_at: int) -> None:
        super().__init__(fsync=True)
        self.left = die_at

    def _count(self) -> bool:
        self.left -= 1
        return self.left == 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in ("make_directory", "open", "write", "truncate", "flush", "rename", "remove"):
            return method

        def dying(*arguments: Any) -> Any:
            if self._count():
                if name == "write":
                    method(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # A kill leaves the caches of the system alone, and real flushes would make up most of the test's time.
            return None if name == "flush" else method(*arguments)

        return dying


def report(**content: Any) -> None:
    os.write(1, json.dumps({"pid": os.getpid(), **content}).encode() + b"\n")


def work(order: dict[str, Any]) -> None:
    path = Path(order["path"])
    disk = DyingDisk(order["die_at"]) if "die_at" in order else Disk(fsync=order.get("fsync", True))
    report(event="start")
    if (path / "meta.json").exists():
        writer = RunWriter.resume(path, order.get("step"), disk=disk)
    else:
        writer = RunWriter.create(path, {"model": "none"}, disk=disk)
    report(event="open", attempt=writer.attempt, last=writer.last_step)
    if order.get("fork"):  # a worker that outlives its parent
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        report(event="worker", worker=worker)
    first = 0 if writer.last_step is None else writer.last_step + 1
    for step in range(first, first + order["steps"]):
        if order.get("gate") and step and step % order["gate"] == 0:  # wait until the reader has caught up
            while not (path / f"gate_{step}").exists():
                time.sleep(0.001)
        report(event="try", step=step, attempt=writer.attempt)
        arrays = arrays_of(step, writer.attempt, order.get("size", 24))
        writer.append(step, scalars_of(step, writer.attempt), arrays)
        report(event="done", step=step, attempt=writer.attempt)
    if order.get("wait"):
        time.sleep(60)
    writer.close()


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                work(json.loads(line))
            except BaseException as error:
                report(event="error", message=f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.write(1, json.dumps({"pid": child, "event": "end"}).encode() + b"\n")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
