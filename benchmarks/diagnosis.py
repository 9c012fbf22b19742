"""How often the cause of a broken run is named: sabotaged and healthy runs, a table, and whether the advice helped.

    python benchmarks/diagnosis.py make --set quick --out /tmp/runs            # one seed of everything
    python benchmarks/diagnosis.py make --set full --jobs 16 --out /tmp/runs   # 5 seeds, held-out networks, remedies
    python benchmarks/diagnosis.py make --set third --jobs 16 --out /tmp/runs  # networks and data of neither
    python benchmarks/diagnosis.py table /tmp/runs                             # the table, from what was recorded

The third set needs Fashion-MNIST, under $GRAMSCOPE_DATA or in ../shared/data.

``make`` trains each run with ``gs.watch`` at its default settings and keeps the recorded series in runs.jsonl.gz.
"""

import argparse
import contextlib
import gzip
import io
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
RUNS = "runs.jsonl.gz"
HEALTHY_SEEDS = 8  # so that healthy runs are at least as many as sabotaged ones
REMEDY_SEEDS = 3


@dataclass(frozen=True)
class Case:
    """One run: ``kind`` of sabotage ("healthy" for none), and whether the first remedy is applied."""

    part: str  # calibration, holdout or third
    kind: str
    network: str
    seed: int
    remedy: bool
    setup: Any


def cases(which: str) -> list[Case]:
    from diagnosis_sabotage import BASES, NETWORKS, SABOTAGES, changed, healthy_setups

    parts = {"quick": [("calibration", [0])], "calibration": [("calibration", range(5))],
             "holdout": [("holdout", range(10, 15))], "third": [("third", range(20, 25))]}  # fmt: skip
    chosen = parts.get(which) or parts["calibration"] + parts["holdout"]
    found = []
    for part, seeds in chosen:
        for sabotage, seed in itertools.product(SABOTAGES, seeds):
            where = sabotage.odd if sabotage.odd and seed % 2 else sabotage.where
            for network, changes in where.items():
                broken = changed(BASES[part][network], changes)
                found.append(Case(part, sabotage.kind, network, seed, False, broken))
                if part != "holdout" and seed < seeds[0] + REMEDY_SEEDS:
                    repaired = changed(broken, sabotage.remedy)
                    found.append(Case(part, sabotage.kind, network, seed, True, repaired))
        more = seeds if which == "quick" else range(seeds[0], seeds[0] + HEALTHY_SEEDS)
        for network, seed in itertools.product(NETWORKS, more):
            setups = healthy_setups(network, BASES[part][network])
            some = setups if which != "quick" else setups[::3]
            found += [Case(part, "healthy", network, 100 * place + seed, False, s) for place, s in enumerate(some)]
    return found


def run_case(case: Case) -> dict[str, Any]:
    """Train one run in a folder of its own, and give what was recorded."""
    import torch

    torch.set_num_threads(1)
    from diagnosis_training import train

    folder = Path(tempfile.mkdtemp())
    begun = time.process_time()
    found: dict[str, Any] = {**asdict(case), "setup": {k: v for k, v in asdict(case.setup).items() if v != {}}}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            found["score"] = {k: _short(v) for k, v in train(case.setup, case.seed, folder / "run").items()}
        found |= recorded(folder / "run")
    except Exception as error:  # one broken run must not lose the others; the table counts it
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found | {"seconds": round(time.process_time() - begun, 2)}


def recorded(path: Path) -> dict[str, Any]:
    """The scalars of every record, and what was logged, with six digits."""
    from gramscope.store import open_run

    run = open_run(path)
    records = [[r.step, {k: _short(v) for k, v in r.scalars.items()}, sorted(r.failures)] for r in run.view]
    logged = {
        name: [found.steps.tolist(), [_short(v) for v in found.values.tolist()]]
        for name, found in run.logged_numbers().items()
    }
    meta = {"layers": run.meta["layers"], "parameters": run.meta["parameters"]}
    return {"records": records, "logged": logged, "meta": meta}


def _short(value: float) -> float | str:
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def make(which: str, out: Path, jobs: int, only: str, minutes: float, remedies: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    todo = [case for case in cases(which) if only in f"{case.kind}/{case.network}" and (case.remedy or not remedies)]
    todo = [todo[place] for place in _spread(len(todo))]
    print(f"{len(todo)} runs", flush=True)
    begun = time.time()
    with get_context("spawn").Pool(jobs) as pool, gzip.open(out / RUNS, "wt", encoding="utf-8") as file:
        for count, found in enumerate(pool.imap_unordered(run_case, todo), 1):
            file.write(json.dumps(found) + "\n")
            if found.get("error"):
                print(found["kind"], found["network"], found["error"], flush=True)
            if count % 50 == 0:
                print(f"{count} of {len(todo)} runs after {time.time() - begun:.0f} s", flush=True)
            if time.time() - begun > 60 * minutes:
                print(f"stopped after {minutes} minutes; the order is mixed, so there is something of everything")
                break
    print(f"{count} runs in {time.time() - begun:.0f} s: {out / RUNS}", flush=True)


def _spread(n: int) -> list[int]:
    """An order in which any first part has something of everything."""
    return sorted(range(n), key=lambda place: (place * 7919) % max(n, 1)) if n % 7919 else list(range(n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--set", default="quick", choices=("quick", "calibration", "holdout", "third", "full"))
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--jobs", type=int, default=2)
    making.add_argument("--minutes", type=float, default=float("inf"), help="stop then, and keep what there is")
    making.add_argument("--remedies", action="store_true", help="only the runs to which the first remedy is applied")
    making.add_argument("--only", default="", help="part of kind/network")
    table = commands.add_parser("table")
    table.add_argument("folder", type=Path)
    table.add_argument("--part", default="", help="calibration, holdout or third")
    table.add_argument("--wrong", action="store_true", help="list every run that was not named first")
    given = parser.parse_args()
    if given.command == "make":
        os.environ["OMP_NUM_THREADS"] = "1"
        make(given.set, given.out, given.jobs, given.only, given.minutes, given.remedies)
    else:
        from diagnosis_table import show

        show(given.folder / RUNS, given.part, given.wrong)


if __name__ == "__main__":
    main()
