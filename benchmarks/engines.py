"""Real engines fill one folder of tiles with two workers each: torchrun, submitit (local), Dask and Ray.

    python benchmarks/engines.py                     those that are installed
    python benchmarks/engines.py --engine dask ray

Every worker makes the same call of gs.ntk(..., out=folder). All folders must have the bytes of that of one process.
`seconds` counts the start of the engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import gramscope as gs

os.environ["OMP_NUM_THREADS"] = "1"
PATIENCE = 60  # seconds that a worker waits for another
SOURCE = str(Path(gs.__file__).parents[1])


class Unhurried(torch.nn.Sequential):
    """A network whose passes take a moment, so that each worker has its part on a busy machine too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return torch.nn.Sequential.forward(self, x)


def fill(folder: str, workers: int = 2) -> int:
    """What each worker runs: tiles that are missing; returns the number of its process.

    It waits for the others, or the first would have done everything before the engine has started the second.
    """
    torch.set_num_threads(1)
    base, begun = Path(folder).parent, time.monotonic()
    base.mkdir(parents=True, exist_ok=True)
    (base / f"started.{os.getpid()}").touch()
    while len(list(base.glob("started.*"))) < workers and time.monotonic() - begun < PATIENCE:
        time.sleep(0.05)
    torch.manual_seed(0)
    model = Unhurried(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    gs.ntk(model, torch.randn(384, 20), reduce="trace", out=folder, tile=64, memory="500MB")
    return os.getpid()


def with_torchrun(folder: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, "--worker", folder]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": SOURCE})


def with_submitit(folder: str) -> None:
    import submitit

    executor = submitit.AutoExecutor(folder=Path(folder).with_name("logs"), cluster="local")
    executor.update_parameters(timeout_min=5, cpus_per_task=1)
    jobs = [executor.submit(fill, folder) for _ in range(2)]
    for job in jobs:
        job.result()


def with_dask(folder: str) -> None:
    import dask

    tasks = [dask.delayed(fill, pure=False)(folder) for _ in range(2)]
    dask.compute(*tasks, scheduler="processes", num_workers=2, chunksize=1)  # or one process takes six tasks


def with_ray(folder: str) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray.get([ray.remote(fill).remote(folder) for _ in range(2)])
    finally:
        ray.shutdown()


ENGINES = {"torchrun": with_torchrun, "submitit": with_submitit, "dask": with_dask, "ray": with_ray}


def tiles(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "kernel").iterdir() if not path.name.startswith(".")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        fill(options.worker)
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as base:
        begun = time.perf_counter()
        fill(str(Path(base) / "alone" / "K"), workers=1)
        print(f"one process  {time.perf_counter() - begun:6.1f} s", flush=True)
        wanted = tiles(Path(base) / "alone" / "K")
        for name in options.engine:
            if name != "torchrun" and importlib.util.find_spec(name) is None:
                print(f"{name:12s} is not installed", flush=True)
                continue
            folder = Path(base) / name / "K"
            begun = time.perf_counter()
            ENGINES[name](str(folder))
            seconds = time.perf_counter() - begun
            by = [json.loads(path.read_text())["process"] for path in (folder / "tiles").glob("*.json")]
            same = "the same bytes" if tiles(folder) == wanted else "OTHER BYTES"
            shares = " + ".join(str(by.count(process)) for process in sorted(set(by)))
            print(f"{name:12s} {seconds:6.1f} s   {same} as one process   tiles by worker: {shares}", flush=True)
            if tiles(folder) != wanted:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
