"""The confusion table of benchmarks/diagnosis.py: findings of recorded series, rates, earliest steps, remedies."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gramscope.diagnose.finding import NOTHING_WRONG
from gramscope.diagnose.history import History, Series, history_of_records
from gramscope.diagnose.ranking import diagnosis_of

MORE = 0.02  # of accuracy
BETTER = 0.9  # times the loss: a run whose held-out loss fell below that has improved


@dataclass(frozen=True)
class Judged:
    """One run with what was said about it; ``earliest``: the first step at which the kind was named for good."""

    run: dict[str, Any]
    named: tuple[str, ...]
    earliest: float

    @property
    def kind(self) -> str:
        return str(self.run["kind"])


def load(path: Path) -> Iterator[dict[str, Any]]:
    """All runs of a file; one that is still being written is read as far as it goes."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        try:
            for line in file:
                yield json.loads(line)
        except (EOFError, json.JSONDecodeError, zlib.error):
            return


def history(run: dict[str, Any]) -> History:
    logged = {
        name: Series(np.array(s, dtype=float), np.array(v, dtype=float)) for name, (s, v) in run["logged"].items()
    }
    rows = [(step, {k: float(v) for k, v in scalars.items()}) for step, scalars, _ in run["records"]]
    return history_of_records(rows, logged, run["meta"])


def judged(run: dict[str, Any]) -> Judged:
    whole = history(run)
    named = tuple(finding.kind for finding in diagnosis_of(whole).findings if finding.kind != NOTHING_WRONG)
    earliest = float("nan")
    if run["kind"] in named:
        for step in reversed(whole.steps.tolist()):
            if run["kind"] not in {f.kind for f in diagnosis_of(whole.until(step)).findings}:
                break
            earliest = step
    return Judged(run, named, earliest)


def rows_of(found: Sequence[Judged]) -> list[str]:
    """The table by kind, in Markdown."""
    lines = ["| kind | runs | named first | named at all | earliest step, median | named first instead |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for kind in dict.fromkeys(j.kind for j in found if j.kind != "healthy"):
        own = [j for j in found if j.kind == kind]
        first = sum(j.named[:1] == (kind,) for j in own)
        ever = sum(kind in j.named for j in own)
        steps = [j.earliest for j in own if np.isfinite(j.earliest)]
        others = Counter(j.named[0] if j.named else "nothing" for j in own if j.named[:1] != (kind,))
        instead = ", ".join(f"{name} {count}" for name, count in others.most_common())
        step = f"{np.median(steps):.0f}" if steps else ""
        lines.append(f"| {kind} | {len(own)} | {first} | {ever} | {step} | {instead} |")
    return lines


def totals(found: Sequence[Judged]) -> list[str]:
    broken, healthy = [j for j in found if j.kind != "healthy"], [j for j in found if j.kind == "healthy"]
    first, ever = (sum(j.named[:1] == (j.kind,) for j in broken), sum(j.kind in j.named for j in broken))
    alarms = [j for j in healthy if j.named]
    which = Counter(j.named[0] for j in alarms)
    said = []
    if broken:
        said.append(
            f"{len(broken)} sabotaged runs: named first {first / len(broken):.1%}, named {ever / len(broken):.1%}."
        )
    if healthy:
        share = f"{len(alarms) / len(healthy):.1%}"
        kinds = ", ".join(f"{name} {count}" for name, count in which.most_common()) or "none"
        said.append(f"{len(healthy)} healthy runs: false alarms on {len(alarms)} ({share}): {kinds}.")
    return said


def remedies(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Whether the first remedy brought the held-out loss below 0.9 of what it was, by kind."""
    before = {_key(run): run for run in runs if not run["remedy"]}
    lines = ["| kind | runs with the remedy | improved | median loss before | after |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(run["kind"] for run in runs if run["remedy"]):
        pairs = [(_loss(before[_key(run)]), _loss(run)) for run in runs if run["remedy"] and run["kind"] == kind
                 and _key(run) in before]  # fmt: skip
        better = sum(_improved(before[_key(run)], run) for run in runs if run["remedy"] and run["kind"] == kind
                     and _key(run) in before)  # fmt: skip
        old, new = (np.median([pair[place] for pair in pairs]) if pairs else np.nan for place in (0, 1))
        lines.append(f"| {kind} | {len(pairs)} | {better} | {old:.3g} | {new:.3g} |")
    return lines


def _improved(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """A lower held-out loss; or a higher accuracy in the log, where the mistake lies in how that is measured.

    Where the mistake lies in the split: the probe's loss understates that of fresh examples by half as much, or less.
    """
    if "fresh_loss" in before["score"]:
        return 2 * _understated(after) < _understated(before)
    logged = [run["logged"].get("test_accuracy", [[0], [0.0]])[1][-1] for run in (before, after)]
    return _loss(after) < BETTER * _loss(before) or float(logged[1]) > float(logged[0]) + MORE


def _understated(run: dict[str, Any]) -> float:
    """How far the probe's loss lies below that of fresh examples, log(fresh loss / loss); 0 where it lies above."""
    return max(0.0, float(np.log(float(run["score"]["fresh_loss"]) / _loss(run))))


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["part"], run["kind"], run["network"], run["seed"]


def _loss(run: dict[str, Any]) -> float:
    value = float(run["score"]["loss"])
    return value if np.isfinite(value) else np.inf


def show(path: Path, part: str, wrong: bool) -> None:
    runs = [run for run in load(path) if part in run["part"]]
    failed = [run for run in runs if "error" in run]
    runs = [run for run in runs if "error" not in run]
    found = [judged(run) for run in runs if not run["remedy"]]
    print(*rows_of(found), "", *totals(found), "", *remedies(runs), sep="\n")
    for run in failed:
        print("not run:", run["kind"], run["network"], run["seed"], run["error"])
    if wrong:
        for j in found:
            if j.named[:1] != (j.kind,) and (j.kind != "healthy" or j.named):
                print(
                    f"{j.kind}/{j.run['network']}/{j.run['seed']}: {', '.join(j.named) or 'nothing'} {j.run['score']}"
                )
