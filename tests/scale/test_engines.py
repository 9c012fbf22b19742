"""Real engines fill one folder together: each starts processes in its own way, and the bytes are those of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize("name", ["torchrun", "submitit", "dask", "ray"])
def test_an_engine_gives_the_bytes_of_one_process(name):
    if name != "torchrun":
        pytest.importorskip(name, reason=f"{name} is an extra")
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--engine", name]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.search(rf"^{name} .* the same bytes as one process   tiles by worker: (\d+) \+ (\d+)$", done.stdout, re.M)
    assert told, done.stdout
    assert sum(map(int, told.groups())) == 21
