"""How often the cause of a broken run is named: sabotaged and healthy runs, a table, and whether the advice helped.

    python benchmarks/diagnosis.py make --set quick --out /tmp/runs                # one seed of the 32 kinds
    python benchmarks/diagnosis.py make --set third tenth --jobs 12 --out /tmp/runs
    python benchmarks/diagnosis.py table /tmp/runs --set third                     # the table, from what was recorded
    python benchmarks/diagnosis.py scores --set ninth                              # only how well healthy runs learn

Sets: ``quick`` and ``calibration`` (the rules were fitted on these); ``third`` and ``tenth`` (others, with data of
Fashion-MNIST and MNIST under $GRAMSCOPE_DATA or in ../shared/data), ``fourth``, ``fifth``, ``ninth`` and ``eleventh``
(other people's networks and faults; the last two need transformers), all held out until they were first judged;
``draw-9``: settings and faults drawn at random, with a number that nobody has drawn a set that nobody has seen.

``make`` trains each run with ``gs.watch`` at its default settings and keeps the recorded series in runs-0.jsonl.gz and
so on. One process for each core: the watch keeps to a share of the time, so a busy machine records less.
"""

import argparse
import contextlib
import gzip
import importlib
import io
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
MEMBER, LARGEST = 20, 12_000_000  # runs that are written at once; bytes of a file, after which the next is begun
LEFT_OUT = ("share/", "alpha", "target_linearity", "delta_", "gram_vc", "flips", "skipped", "overhead", "weight_norm/",
            "collapse/")  # no rule asks for these  # fmt: skip
SEEDS = {"quick": 0, "calibration": 0, "third": 20, "tenth": 30}  # the first of them
BROKEN_SEEDS, HEALTHY_SEEDS, REMEDY_SEEDS = 5, 9, 3  # healthy runs are at least as many as sabotaged ones


@dataclass(frozen=True)
class Case:
    """One run to be made: the place in the runs of its set, and whether the first remedy is applied."""

    set: str
    place: int
    seed: int
    remedied: bool = False


@cache
def runs_of(name: str, seed: int) -> list[Any]:
    """The runs of a set, sabotaged ones first."""
    if name in SEEDS:
        from diagnosis_sabotage import broken_runs, healthy_runs

        part = "calibration" if name == "quick" else name
        healthy = healthy_runs(part)
        return broken_runs(part, seed) + (healthy[::3] if name == "quick" else healthy)
    if name.startswith("draw-"):
        return importlib.import_module("diagnosis_drawn").draw(int(name.removeprefix("draw-")))
    chosen = importlib.import_module(f"diagnosis_{name}")
    return [*chosen.FAULTS, *chosen.HEALTHY]


def cases(name: str) -> list[Case]:
    if name not in SEEDS:
        seed = int(name.removeprefix("draw-")) if name.startswith("draw-") else 0
        return [Case(name, place, seed) for place in range(len(runs_of(name, seed)))]
    first, found = SEEDS[name], list[Case]()
    broken, healthy, remedied = (1, 1, 1) if name == "quick" else (BROKEN_SEEDS, HEALTHY_SEEDS, REMEDY_SEEDS)
    for seed in range(first, first + max(broken, healthy)):
        for place, run in enumerate(runs_of(name, seed)):
            if seed < first + (healthy if run.healthy else broken):
                found.append(Case(name, place, seed))
            if run.remedy is not None and seed < first + remedied:
                found.append(Case(name, place, seed, remedied=True))
    return found


def run_case(case: Case) -> dict[str, Any]:
    """Train one run in a folder of its own, and give what was recorded."""
    import torch

    torch.set_num_threads(1)
    from diagnosis_loop import train

    run, folder, begun = runs_of(case.set, case.seed)[case.place], Path(tempfile.mkdtemp()), time.process_time()
    found: dict[str, Any] = {"set": case.set, "name": run.name, "right": run.right, "healthy": run.healthy,
                             "must_learn": run.must_learn, "place": case.place, "seed": case.seed,
                             "remedied": case.remedied}  # fmt: skip
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            score = train(run, case.seed, None if case.remedied else folder / "run", case.remedied)
        found["score"] = {name: _short(value) for name, value in score.items()}
        found |= recorded(folder / "run") if not case.remedied else {}
    except Exception as error:  # one broken run must not lose the others; the table counts it
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found | {"seconds": round(time.process_time() - begun, 2)}


def recorded(path: Path) -> dict[str, Any]:
    """The scalars that a rule may ask for, and what was logged, with five digits."""
    from gramscope.diagnose.divergence import speaks_of_finite
    from gramscope.store import open_run

    run = open_run(path)
    ruined = [r.step for r in run.view if any(map(speaks_of_finite, r.failures.values()))]
    series: dict[str, list[list[Any]]] = {}
    for record in run.view:
        for name, value in record.scalars.items():
            if name.startswith(LEFT_OUT):
                continue
            steps, values = series.setdefault(name, [[], []])
            steps.append(record.step), values.append(_short(value))
    logged = {
        name: [found.steps.tolist(), [_short(v) for v in found.values.tolist()]]
        for name, found in run.logged_numbers().items()
    }
    meta = {"layers": run.meta["layers"], "parameters": run.meta["parameters"]}
    steps = [record.step for record in run.view]
    return {"steps": steps, "series": series, "logged": logged, "meta": meta, "ruined": ruined}


def _short(value: float) -> float | str:
    value = float(value)
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


def make(names: list[str], then: list[str], out: Path, jobs: int, only: str, seconds: float) -> None:
    """Runs of ``names`` in mixed order, then those of ``then``."""
    out.mkdir(parents=True, exist_ok=True)
    todo = [case for group in (names, then) for case in _mixed(group) if only in _label(case)]
    print(f"{len(todo)} runs", flush=True)
    begun, lines, count = time.time(), list[str](), 0
    with get_context("spawn").Pool(jobs) as pool:
        for count, found in enumerate(pool.imap_unordered(run_case, todo), 1):
            lines.append(json.dumps(found, separators=(",", ":")))
            if found.get("error"):
                print(found["set"], found["right"], found["name"], found["error"], flush=True)
            if count % MEMBER == 0 or count == len(todo):
                _append(out, lines)
                print(f"{count} of {len(todo)} runs after {time.time() - begun:.0f} s", flush=True)
            if time.time() - begun > seconds:
                print(f"stopped after {seconds:.0f} s; the order is mixed, so there is something of everything")
                break
    _append(out, lines)
    print(f"{count} runs in {time.time() - begun:.0f} s: {out}", flush=True)


def _append(out: Path, lines: list[str]) -> None:
    """To the last file that has room; each call writes a part of the file that can be read by itself."""
    files = sorted(out.glob("runs-*.jsonl.gz"))
    room = files and files[-1].stat().st_size < LARGEST
    with gzip.open(files[-1] if room else out / f"runs-{len(files)}.jsonl.gz", "at", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    lines.clear()


def _mixed(names: list[str]) -> list[Case]:
    """In an order in which any first part has something of everything."""
    found = [case for name in names for case in cases(name)]
    random.Random(0).shuffle(found)
    return found


def _label(case: Case) -> str:
    run = runs_of(case.set, case.seed)[case.place]
    return f"{case.set}/{' '.join(run.right) or 'healthy'}/{run.name}/{'remedy' if case.remedied else 'run'}"


def scores(names: list[str], only: str) -> None:
    """Train healthy runs without measuring them: whoever writes a set sees that they learn, and no finding."""
    from diagnosis_loop import train

    warnings.simplefilter("ignore")
    for name in names:
        for run in runs_of(name, SEEDS.get(name, 0)):
            if run.healthy and only in run.name:
                with contextlib.redirect_stderr(io.StringIO()):
                    found = train(run, 99, None)
                print(f"{name}, {run.name} {sorted(run.o)}:", *(f"{k} {v:.3g}" for k, v in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "table", "scores"))
    parser.add_argument("folder", type=Path, nargs="?", help="of table")
    parser.add_argument("--set", nargs="+", default=[], dest="names")
    parser.add_argument("--then", nargs="+", default=[], help="sets that are made after these")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then, and keep what there is")
    parser.add_argument("--only", default="", help="part of set/kind/network/run (or remedy)")
    parser.add_argument("--each", action="store_true", help="a line for every run, as for the sets of other people")
    parser.add_argument("--wrong", action="store_true", help="the same of runs that were not named first")
    given = parser.parse_args()
    if given.command == "make":
        os.environ["OMP_NUM_THREADS"] = "1"
        make(given.names or ["quick"], given.then, given.out, given.jobs, given.only, given.seconds)
    elif given.command == "scores":
        scores(given.names, given.only)
    else:
        from diagnosis_table import show

        show(given.folder, given.names, given.each, given.wrong)


if __name__ == "__main__":
    main()
