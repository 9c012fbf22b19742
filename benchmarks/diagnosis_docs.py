"""Turns recorded runs into what is published: results/diagnosis.md, the page docs/diagnosis.md, the confidences.

    PYTHONPATH=src:tests python benchmarks/diagnosis_docs.py /tmp/runs "rules of cb18400, torch 2.11, 12 processes"

Of the page it writes the rates, the kinds, the remedies and the rules (docstrings, examples, thresholds); of the
results all that stands above "How the rules came to be"; of src/gramscope/diagnose/held_out_rates.py the counts.
"""

import inspect
import re
import sys
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))
from diagnosis_table import Judged, Recorded, counts_of, judged, load, remedies, rows_of, totals

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "diagnosis.md", ROOT / "benchmarks" / "results" / "diagnosis.md"
RATES = ROOT / "src" / "gramscope" / "diagnose" / "held_out_rates.py"
SETS = {
    "third": "third set: the benchmark's faults, other networks and data",
    "tenth": "tenth set: the same, other networks and data again",
    "draws": "draws: networks of strangers, settings and faults drawn at random",
    "calibration": "calibration set: in view, the rules were fitted on it",
    "second": "second set: in view, the rules were fitted on it",
}
HELD_OUT, BY_KIND = ("third", "tenth", "draws"), ("third", "tenth")
ABOUT = (
    "Rates of the third and the tenth set. From step: the first step from which on the cause was named for good, of "
    "runs of 180 to 250 steps."
)
PAST = "# How the rules came to be what they are\n"
KINDS_HEADING, NEXT, HEADING = "## The kinds\n", "## Where it fails\n", "## The rules\n"
SetsOfRuns = dict[str, list[Judged]]


def by_set(found: list[Judged]) -> SetsOfRuns:
    sets: SetsOfRuns = {}
    for j in found:
        sets.setdefault("draws" if j.run["set"].startswith("draw-") else j.run["set"], []).append(j)
    return {name: sets[name] for name in SETS if name in sets}


# Results -------------------------------------------------------------------------------------------------------------
def results(sets: SetsOfRuns, runs: list[Recorded], about: str) -> str:
    lines = [f"# benchmarks/diagnosis.py: {about}; gs.watch at default settings with scope.use(optimizer)", ""]
    for name, found in sets.items():
        own = [run for run in runs if run["set"] == name]
        advice = ["", "### Remedies", "", *remedies(own)] if any(run["remedied"] for run in own) else []
        wrong = [f"- {j} {j.run['score']}" for j in found if j.verdict in ("named", "MISSED", "FALSE ALARM")]
        lines += [f"## {SETS[name]}", "", *rows_of(found), "", *totals(found), *advice, ""]
        lines += ["### Not named first, and false alarms", "", *sorted(wrong), ""]
    return "\n".join(lines) + "\n"


# The page ------------------------------------------------------------------------------------------------------------
def rate(name: str, found: list[Judged]) -> str:
    verdicts = [j.verdict for j in found]
    first, named, missed, quiet, alarms = map(verdicts.count, ("first", "named", "MISSED", "quiet", "FALSE ALARM"))
    broken, healthy, ever = first + named + missed, quiet + alarms, first + named
    shares = (
        f"**{first / broken:.0%}** ({first}) | {ever / broken:.0%} ({ever}) | {healthy} | **{alarms / healthy:.0%}**"
    )
    return f"| {SETS[name]} | {broken} | {shares} ({alarms}) |".replace("%", " %")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def advice(runs: list[Recorded]) -> list[str]:
    """One line a kind: in how many runs of each set the first remedy helped."""
    helped: dict[str, dict[str, str]] = {}
    names = [name for name in ("calibration", "second", "third", "tenth") if any(r["set"] == name for r in runs)]
    for name in names:
        for row in remedies([run for run in runs if run["set"] == name])[2:]:
            kind, count, improved, *_ = cells(row)
            helped.setdefault(kind, {})[name] = f"{improved} of {count}"
    lines = [f"| kind | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    return lines + [f"| {kind} | {' | '.join(own.get(n, '') for n in names)} |" for kind, own in sorted(helped.items())]


def section(kind: str, row: str) -> str:
    """One rule, as the page has it; ``row`` is its row of the table."""
    from diagnose.histories import BROKEN  # the hand-written series of the tests
    from gramscope.diagnose.ranking import diagnosis_of

    module = import_module(f"gramscope.diagnose.rules.{kind}")
    finding = diagnosis_of(BROKEN[kind]())[0]
    lines = [f"### {kind.replace('_', ' ')}", "", inspect.cleandoc(module.find.__doc__ or ""), ""]
    lines += [f"- Example: {finding.what}", f"- Cause: {finding.cause}", f"- Try first: {finding.remedy}"]
    numbers = thresholds(module)
    if numbers:
        lines.append(f"- Thresholds (`src/gramscope/diagnose/rules/{kind}.py`): {', '.join(numbers)}")
    _, runs, first, ever, step, instead = cells(row)
    seen = f", from step {step} on (median)" if step else ""
    others = f"; instead: {instead}" if instead else ""
    lines.append(f"- Held out: {runs} runs, named first {first}, named at all {ever}{seen}{others}")
    return "\n".join(lines)


def thresholds(module: ModuleType) -> list[str]:
    """The numbers that the file of a rule gives names to."""
    lines = inspect.getsource(module).splitlines()
    own = [line.partition("=")[0].strip() for line in lines if line[:1].isupper() and "=" in line]
    names = [name.strip() for left in own for name in left.split(",")]
    return [f"`{name}` {getattr(module, name):g}" for name in names if isinstance(getattr(module, name), int | float)]


def summary(rows: dict[str, str]) -> str:
    """One line a kind: what it is and how often it was named."""
    from gramscope.diagnose.rules import KINDS

    lines = ["| kind | what the rule looks for | held-out runs | named first | named at all | from step (median) |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        title = import_module(f"gramscope.diagnose.rules.{kind}").__doc__.strip().rstrip(".")
        _, runs, first, ever, step, _ = cells(rows[kind])
        lines.append(f"| [{kind}](#{kind.replace('_', '-')}) | {title} | {runs} | {first} | {ever} | {step} |")
    return f"{ABOUT}\n\n" + "\n".join(lines)


def page(text: str, sets: SetsOfRuns, runs: list[Recorded]) -> str:
    from gramscope.diagnose.rules import KINDS

    text = _between(text, "rates", [rate(name, found) for name, found in sets.items()], table=True)
    text = _between(text, "advice", advice(runs))
    rows = {cells(row)[0]: row for row in rows_of([j for name in BY_KIND for j in sets.get(name, [])])[2:]}
    before, after = text[: text.index(KINDS_HEADING)], text[text.index(NEXT) : text.index(HEADING)]
    body = "\n\n".join(section(kind, rows[kind]) for kind in KINDS)
    return f"{before}{KINDS_HEADING}\n{summary(rows)}\n\n{after}{HEADING}\n{body}\n"


def _between(text: str, name: str, lines: list[str], table: bool = False) -> str:
    """The text with other lines between ``<!-- name -->`` and ``<!-- end of name -->``."""
    head = ["| runs | faults | named first | named at all | healthy runs | false alarms |", "|---|---|---|---|---|---|"]
    made = "\n".join([*(head if table else []), *lines])
    return re.sub(
        rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end of {name} -->)", lambda m: m[1] + made + m[2], text, flags=re.S
    )


def counts(text: str, found: list[Judged]) -> str:
    lines = [f'    "{kind}": ({right}, {named}),' for kind, (right, named) in counts_of(found).items()]
    made = "COUNTS: dict[str, tuple[int, int]] = {\n" + "\n".join(lines) + "\n}\n"
    return re.sub(r"COUNTS: dict.*?\n}\n", made, text, flags=re.S)


def main() -> None:
    folder, about = Path(sys.argv[1]), sys.argv[2]
    runs = [run for run in load(folder) if "error" not in run]
    with get_context("spawn").Pool(2) as pool:
        found = pool.map(judged, [run for run in runs if not run["remedied"]], chunksize=20)
    sets = by_set(found)
    old = RESULTS.read_text(encoding="utf-8")
    RESULTS.write_text(results(sets, runs, about) + old[old.index(PAST) :], encoding="utf-8")
    held_out = [j for name in HELD_OUT for j in sets.get(name, [])]
    RATES.write_text(counts(RATES.read_text(encoding="utf-8"), held_out), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), sets, runs), encoding="utf-8")


if __name__ == "__main__":
    main()
