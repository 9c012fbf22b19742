"""Turns recorded runs into what is published: results/diagnosis.md, the page docs/diagnosis.md, the confidences.

    PYTHONPATH=src python benchmarks/diagnosis_docs.py judge /tmp/judged /tmp/runs /tmp/drawn  # by this source's rules
    PYTHONPATH=src:tests python benchmarks/diagnosis_docs.py write /tmp/first /tmp/judged

``write`` takes what was judged by the rules before anything was repaired in view of these runs, and by the rules as
they are; the draws, after which nothing was changed, from the latter. Of the page it writes the rates, the kinds, the
remedies and the rules (docstrings, examples, thresholds); of the results all that stands above "How the rules came to
be"; of src/gramscope/diagnose/held_out_rates.py the counts.
"""

import inspect
import pickle
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))
from diagnosis_table import Judged, Recorded, counts_of, judged, load, remedies, rows_of, totals

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "diagnosis.md", ROOT / "benchmarks" / "results" / "diagnosis.md"
RATES = ROOT / "src" / "gramscope" / "diagnose" / "held_out_rates.py"
SETS = {
    "tenth": "32 kinds of faults × 4 networks × 5 seeds (tenth set)",
    "third": "the same, other networks and data (third set)",
    "eleventh": "what people try first: tutorials, Hugging Face (eleventh set)",
    "draws": "49 networks, faults and settings drawn at random (draw 1118)",
}
BY_KIND, CHANGED_AFTER = ("third", "tenth"), ("tenth", "third", "eleventh")
ABOUT = (
    "Rates of the third and the tenth set, held out. From step: the first step from which on the cause was named for "
    "good, of runs of 180 to 250 steps. Now: named first by the rules as they are, which were repaired since."
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
def results(first: SetsOfRuns, now: SetsOfRuns, runs: list[Recorded]) -> str:
    lines = ["# benchmarks/diagnosis.py: gs.watch at default settings with scope.use(optimizer)", ""]
    for name, found in first.items():
        own = [run for run in runs if run["set"] == name]
        advice = ["", "### Remedies", "", *remedies(own)] if any(run["remedied"] for run in own) else []
        lines += [f"## {SETS[name]}: held out", "", *rows_of(found), "", *totals(found), *advice, ""]
        lines += ["### Not named first, and false alarms", "", *wrong(found), ""]
        if name in CHANGED_AFTER:
            lines += ["### By the rules as they are, repaired in view of these runs", "", *totals(now[name]), ""]
            lines += [*wrong(now[name]), ""]
    return "\n".join(lines) + "\n"


def wrong(found: list[Judged]) -> list[str]:
    return sorted(f"- {j} {j.run['score']}" for j in found if j.verdict in ("named", "MISSED", "FALSE ALARM"))


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
    names = [name for name in BY_KIND if any(r["set"] == name for r in runs)]
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


def summary(rows: dict[str, str], now: dict[str, str]) -> str:
    """One line a kind: what it is and how often it was named."""
    from gramscope.diagnose.rules import KINDS

    lines = ["| kind | what the rule looks for | runs | named first | named at all | from step (median) | now |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        title = (import_module(f"gramscope.diagnose.rules.{kind}").__doc__ or "").strip().rstrip(".")
        _, runs, first, ever, step, _ = cells(rows[kind])
        numbers = f"{runs} | {first} | {ever} | {step} | {cells(now[kind])[2]}"
        lines.append(f"| [{kind}](#{kind.replace('_', '-')}) | {title} | {numbers} |")
    return f"{ABOUT}\n\n" + "\n".join(lines)


def page(text: str, first: SetsOfRuns, now: SetsOfRuns, runs: list[Recorded]) -> str:
    from gramscope.diagnose.rules import KINDS

    text = _between(text, "rates", [rate(name, found) for name, found in first.items()], table=True)
    text = _between(text, "rates now", [rate(name, now[name]) for name in CHANGED_AFTER], table=True)
    text = _between(text, "advice", advice(runs))
    rows, rows_now = (by_kind(sets) for sets in (first, now))
    before, after = text[: text.index(KINDS_HEADING)], text[text.index(NEXT) : text.index(HEADING)]
    body = "\n\n".join(section(kind, rows[kind]) for kind in KINDS)
    return f"{before}{KINDS_HEADING}\n{summary(rows, rows_now)}\n\n{after}{HEADING}\n{body}\n"


def by_kind(sets: SetsOfRuns) -> dict[str, str]:
    return {cells(row)[0]: row for row in rows_of([j for name in BY_KIND for j in sets[name]])[2:]}


def _between(text: str, name: str, lines: list[str], table: bool = False) -> str:
    """The text with other lines between ``<!-- name -->`` and ``<!-- end of name -->``."""
    head = ["| tried on | broken runs | right cause named first | named at all | healthy runs | false alarms |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    made = "\n".join([*(head if table else []), *lines])
    return re.sub(
        rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end of {name} -->)", lambda m: m[1] + made + m[2], text, flags=re.S
    )


def counts(text: str, found: list[Judged]) -> str:
    lines = [f'    "{kind}": ({right}, {named}),' for kind, (right, named) in counts_of(found).items()]
    made = "COUNTS: dict[str, tuple[int, int]] = {\n" + "\n".join(lines) + "\n}\n"
    return re.sub(r"COUNTS: dict.*?\n}\n", made, text, flags=re.S)


def judge(out: Path, folders: list[Path]) -> None:
    """What is said about all runs by the rules of this source; the series themselves are left out."""
    found, repeated = list[Judged](), list[Recorded]()
    for run in (run for folder in folders for run in load(folder) if "error" not in run):
        short = {name: value for name, value in run.items() if name not in ("series", "logged", "steps")}
        if run["remedied"]:
            repeated.append(short)
        elif run["set"] in SETS or run["set"].startswith("draw-"):
            found.append(replace(j := judged(run), run=short | {"verdict": j.verdict}))
    out.write_bytes(pickle.dumps((found, repeated)))


def write(first: Path, now: Path) -> None:
    (before, repeated), (found, _) = (pickle.loads(path.read_bytes()) for path in (first, now))
    runs, sets, sets_now = [j.run for j in before] + repeated, by_set(before), by_set(found)
    sets["draws"] = sets_now["draws"]
    old = RESULTS.read_text(encoding="utf-8")
    RESULTS.write_text(results(sets, sets_now, runs) + old[old.index(PAST) :], encoding="utf-8")
    RATES.write_text(counts(RATES.read_text(encoding="utf-8"), found), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), sets, sets_now, runs), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "judge":
        judge(Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
    else:
        write(Path(sys.argv[2]), Path(sys.argv[3]))
