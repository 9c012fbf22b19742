"""One forking process of writers for all tests of a worker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


class Writers:
    """Starts writers in a child process one after the other, and hears what they commit."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "store" / "writing_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def order(self, **order: Any) -> int:
        """Start a writer; its pid once it runs."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return int(self.hear()["pid"])

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def hear_until(self, event: str, each: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
        while True:
            heard = self.hear()
            assert heard["event"] != "error" or event == "error", heard
            each(heard)
            if heard["event"] == event:
                return heard

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def writers() -> Iterator[Writers]:
    writers = Writers()
    yield writers
    assert writers.process.stdin is not None
    writers.process.stdin.close()
    assert writers.process.wait(60) == 0
