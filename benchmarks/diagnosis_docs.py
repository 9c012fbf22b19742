"""Writes the sections "The kinds" and "The rules" of docs/diagnosis.md: docstrings, examples, thresholds, rates.

    PYTHONPATH=src:tests python benchmarks/diagnosis_docs.py

The rates are those of benchmarks/results/diagnosis.md, as benchmarks/diagnosis.py table prints them; of a kind that it
has several times, the first.
"""

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "diagnosis.md"
RESULTS = HERE / "results" / "diagnosis.md"
CELLS = 6
ABOUT = (
    "Rates of the third set, by the rules as they were then. From step: the first step from which on the cause was "
    "named for good, of runs of 200 to 250 steps."
)
KINDS_HEADING, NEXT, HEADING = "## The kinds\n", "## Where it fails\n", "## The rules\n"


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
    _, runs, first, ever, step, instead = (cell.strip() for cell in row.strip("|").split("|"))
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


def published() -> dict[str, str]:
    """The rows of the tables by kind."""
    rows: dict[str, str] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        if line.count("|") == CELLS + 1 and not line.startswith(("|--", "| kind")):
            rows.setdefault(line.split("|")[1].strip(), line)
    return rows


def summary(rows: dict[str, str]) -> str:
    """One line a kind: what it is and how often it was named."""
    from gramscope.diagnose.rules import KINDS

    lines = ["| kind | what the rule looks for | held-out runs | named first | named at all | from step (median) |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        title = import_module(f"gramscope.diagnose.rules.{kind}").__doc__.strip().rstrip(".")
        _, runs, first, ever, step, _ = (cell.strip() for cell in rows[kind].strip("|").split("|"))
        lines.append(f"| [{kind}](#{kind.replace('_', '-')}) | {title} | {runs} | {first} | {ever} | {step} |")
    return f"{ABOUT}\n\n" + "\n".join(lines)


def main() -> None:
    from gramscope.diagnose.rules import KINDS

    rows = published()
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(KINDS_HEADING)], text[text.index(NEXT) : text.index(HEADING)]
    body = "\n\n".join(section(kind, rows[kind]) for kind in KINDS)
    PAGE.write_text(f"{before}{KINDS_HEADING}\n{summary(rows)}\n\n{after}{HEADING}\n{body}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
