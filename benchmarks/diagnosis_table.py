"""The confusion table of benchmarks/diagnosis.py: findings of recorded series, rates, earliest steps, remedies."""

import contextlib
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gramscope.diagnose.finding import NOTHING_WRONG, Diagnosis
from gramscope.diagnose.history import History, Series, history_of_records
from gramscope.diagnose.ranking import diagnosis_of

BETTER = 0.9  # times the loss: a run whose held-out loss fell below that has improved
LEARNT = 0.2  # of the probe's loss is gone: a healthy run with settings drawn at random has learnt
Recorded = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """One run with what was said about it; ``earliest``: the first step from which on the kind was named for good."""

    run: Recorded
    found: Diagnosis
    earliest: float

    @property
    def named(self) -> list[str]:
        return [finding.kind for finding in self.found if finding.kind != NOTHING_WRONG]

    @property
    def verdict(self) -> str:
        """Of a broken run "first", "named" or "MISSED"; of a healthy one "quiet", "FALSE ALARM" or "not learnt"."""
        if "verdict" in self.run:  # told before the series were left out
            return str(self.run["verdict"])
        right, named = set(self.run["right"]), self.named
        if self.run["healthy"]:
            counts = not self.run["must_learn"] or _learnt(self.run)
            return ("FALSE ALARM" if named else "quiet") if counts else "not learnt"
        if not right:
            return "no rule"
        return "first" if named[:1] and named[0] in right else "named" if right & set(named) else "MISSED"

    def __str__(self) -> str:
        said = [f"({f.kind})" if f.follows_from else f.kind for f in self.found]
        kind = "" if ":" in self.run["name"] else f"{' '.join(self.run['right']) or 'healthy'}, "
        return f"{self.verdict:12}{kind}{self.run['name']} [{self.run['seed']}]: {', '.join(said)}"


def load(folder: Path) -> Iterator[Recorded]:
    """All runs of a folder; a file that is still being written is read as far as it goes."""
    for path in sorted(folder.glob("runs-*.jsonl.gz")):
        with contextlib.suppress(EOFError, json.JSONDecodeError, zlib.error), gzip.open(path, "rt") as file:
            yield from map(json.loads, file)


def history(run: Recorded) -> History:
    rows: dict[int, dict[str, float]] = {step: {} for step in run["steps"]}
    for name, (steps, values) in run["series"].items():
        for step, value in zip(steps, values, strict=True):
            rows[step][name] = float(value)
    logged = {name: _series(*points) for name, points in run["logged"].items()}
    return history_of_records(list(rows.items()), logged, run["meta"], run["ruined"])


def _series(steps: Sequence[float], values: Sequence[float | str]) -> Series:
    return Series(np.array(steps, dtype=float), np.array(values, dtype=float))


def judged(run: Recorded) -> Judged:
    whole, right, earliest = history(run), set(run["right"]), float("nan")
    found = diagnosis_of(whole)
    if right & {finding.kind for finding in found}:
        for step in reversed(whole.steps.tolist()):
            if not right & {finding.kind for finding in diagnosis_of(whole.until(step))}:
                break
            earliest = step
    return Judged(run, found, earliest)


def _learnt(run: Recorded) -> bool:
    """Whether the probe's loss has fallen by a fifth; of numbers 0 and 1 binary cross-entropy, which is trained on."""
    name = "yes_or_no/loss" if "yes_or_no/loss" in run["series"] else "loss/probe"
    loss = [value for value in map(float, run["series"][name][1]) if np.isfinite(value)]
    return loss[0] - loss[-1] > LEARNT * abs(loss[0])


# Tables --------------------------------------------------------------------------------------------------------------
def rows_of(found: Sequence[Judged]) -> list[str]:
    """The table by kind, in Markdown; a run that several kinds may name counts with the first."""
    lines = ["| kind | runs | named first | named at all | earliest step, median | named first instead |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for kind in sorted({j.run["right"][0] for j in found if j.run["right"]}):
        own = [j for j in found if j.run["right"][:1] == [kind]]
        verdicts = Counter(j.verdict for j in own)
        steps = [j.earliest for j in own if np.isfinite(j.earliest)]
        others = Counter(j.named[0] if j.named else "nothing" for j in own if j.verdict != "first")
        instead = ", ".join(f"{name} {count}" for name, count in others.most_common())
        step, first = f"{np.median(steps):.0f}" if steps else "", verdicts["first"]
        lines.append(f"| {kind} | {len(own)} | {first} | {first + verdicts['named']} | {step} | {instead} |")
    return lines


def totals(found: Sequence[Judged]) -> list[str]:
    count = Counter(j.verdict for j in found)
    broken, healthy = count["first"] + count["named"] + count["MISSED"], count["quiet"] + count["FALSE ALARM"]
    alarms = Counter(j.named[0] for j in found if j.verdict == "FALSE ALARM")
    kinds = ", ".join(f"{name} {number}" for name, number in alarms.most_common()) or "none"
    first, ever = count["first"], count["first"] + count["named"]
    said = [f"{broken} sabotaged runs: named first {first} ({first / broken:.1%}), named {ever} ({ever / broken:.1%})."
            ] if broken else []  # fmt: skip
    if healthy:
        said.append(f"{healthy} healthy runs: false alarms on {sum(alarms.values())} "
                    f"({sum(alarms.values()) / healthy:.1%}): {kinds}.")  # fmt: skip
    idle = count["not learnt"]
    return said + ([f"{idle} healthy runs did not learn, and do not count."] if idle else [])


def counts_of(found: Sequence[Judged]) -> dict[str, tuple[int, int]]:
    """By kind: times that it was named first and was right, times that it was named first; for held_out_rates.py."""
    named: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for j in found:
        if j.verdict in ("no rule", "not learnt"):
            continue
        kind = j.found[0].kind
        named[kind] += 1
        right[kind] += j.verdict in ("first", "quiet")
    return {kind: (right[kind], named[kind]) for kind in sorted(named)}


def remedies(runs: Sequence[Recorded]) -> list[str]:
    """Whether the first remedy helped, by kind."""
    before = {_key(run): run for run in runs if not run["remedied"]}
    pairs = [(before[_key(run)], run) for run in runs if run["remedied"] and _key(run) in before]
    lines = ["| kind | runs with the remedy | improved | median loss before | after |", "|---|---|---|---|---|"]
    for kind in sorted({run["right"][0] for run, _ in pairs}):
        own = [pair for pair in pairs if pair[0]["right"][0] == kind]
        old, new = (np.median([_loss(pair[place]) for pair in own]) for place in (0, 1))
        lines.append(f"| {kind} | {len(own)} | {sum(_improved(*pair) for pair in own)} | {old:.3g} | {new:.3g} |")
    return lines


def _improved(before: Recorded, after: Recorded) -> bool:
    """The held-out loss fell below 0.9 of what it was; or, where the fault lies in what is measured, the measured
    number lies half as far from the truth, or nearer.
    """
    if "misled" in before["score"]:
        return 2 * float(after["score"]["misled"]) < float(before["score"]["misled"])
    return _loss(after) < BETTER * _loss(before)


def _key(run: Recorded) -> tuple[Any, ...]:
    return run["set"], run["place"], run["seed"]


def _loss(run: Recorded) -> float:
    value = float(run["score"]["loss"])
    return value if np.isfinite(value) else np.inf


def show(folder: Path, names: Sequence[str], each: bool, wrong: bool) -> None:
    runs = [run for run in load(folder) if not names or run["set"] in names]
    failed, runs = [r for r in runs if "error" in r], [r for r in runs if "error" not in r]
    found = [judged(run) for run in runs if not run["remedied"]]
    tables = [] if each else ["", *remedies(runs)]
    print(*rows_of(found), "", *totals(found), *tables, sep="\n")
    for run in failed:
        print(f"not run: {run['set']} {run['right']} {run['name']} [{run['seed']}]: {run['error']}")
    for j in sorted(found, key=lambda j: (j.run["healthy"], j.run["right"], j.run["place"], j.run["seed"])):
        if each or (wrong and j.verdict in ("named", "MISSED", "FALSE ALARM")):
            print(j, f"{j.run['score']}" if wrong else "")
