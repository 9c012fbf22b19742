"""Write anew what follows from the tables under experiments/: the verdicts of each RESULT.md and docs/findings.md.

Run from the repository root, after a result is published or an expected.toml is changed: python tools/findings_table.py
"""

from pathlib import Path

from gramscope.reproduce.expected import read_expected
from gramscope.reproduce.experiments import RESULT_FILE, TABLE_FILE, Experiment, all_experiments
from gramscope.reproduce.verdicts import AGREES, DIFFERS, Verdict, judge
from gramscope.reproduce.writing import HEAD, cells, markdown_table, read_table, summary

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS, PAGE = ROOT / "experiments", ROOT / "docs" / "findings.md"
BEGIN = "<!-- Written by tools/findings_table.py from the committed tables. -->"
END = "<!-- End of the written table. -->"
AFTER = ("Jobs that failed", "![", "No figure")  # what follows the tolerances in RESULT.md


def overview(folder: Path) -> str:
    """Markdown: how many numbers of each experiment agree, then every published number beside ours."""
    judged = {one: _judged(one) for one in all_experiments(folder)}
    lines = [
        "| experiment | what | agree | differ | controls | ours alone | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, verdicts in judged.items():
        lines.append(f"| {one.name} | {one.title} | {_counts(verdicts)} | `gramscope reproduce {one.name}` |")
    for one, verdicts in judged.items():
        published = [verdict for verdict in verdicts or [] if verdict.expected.published is not None]
        if published:
            lines += ["", f"### {one.title}", "", f"Source: {'; '.join(_sources(published))}. ", ""]
            lines[-2] += f"All numbers, the figure and the discussion: `experiments/{one.name}/{RESULT_FILE}`."
            lines += [f"| {' | '.join(HEAD[:-1])} |", f"|{'---|' * len(HEAD[:-1])}"]
            lines += [f"| {' | '.join(cells(verdict)[:-1])} |" for verdict in published]
    return "\n".join(lines)


def _judged(experiment: Experiment) -> list[Verdict] | None:
    table = experiment.folder / TABLE_FILE
    return judge(read_table(table), read_expected(experiment.folder)) if table.exists() else None


def _counts(verdicts: list[Verdict] | None) -> str:
    if verdicts is None:
        return "– | – | – | no full run yet"
    words = [one.verdict for one in verdicts]
    controls = sum(one.expected.control for one in verdicts)
    unpublished = sum(one.expected.published is None for one in verdicts)
    return f"{words.count(AGREES)} | {words.count(DIFFERS)} | {controls} | {unpublished}"


def _sources(verdicts: list[Verdict]) -> list[str]:
    return list(dict.fromkeys(one.expected.source for one in verdicts))


def with_table(page: str, folder: Path) -> str:
    """``page`` with what stands between the two marker lines written anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold the lines {BEGIN!r} and {END!r}.")
    return f"{before}{BEGIN}\n\n{overview(folder)}\n\n{END}{after}"


def with_verdicts(text: str, experiment: Experiment) -> str:
    """A committed ``RESULT.md`` with its verdicts anew, after a change of ``expected.toml``; nothing is run."""
    lines, verdicts = text.splitlines(), _judged(experiment)
    begin = lines.index(markdown_table([])[0]) - 2  # the summary, an empty line, the head of the table
    end = next(place for place in range(begin, len(lines)) if lines[place].startswith(AFTER))
    made = [summary(verdicts or []), "", *markdown_table(verdicts or []), ""]
    return "\n".join([*lines[:begin], *made, *lines[end:]]) + "\n"


def main() -> None:
    for one in all_experiments(EXPERIMENTS):
        result = one.folder / RESULT_FILE
        if result.exists():
            result.write_text(with_verdicts(result.read_text(encoding="utf-8"), one), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), EXPERIMENTS), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)} and the verdicts of every {RESULT_FILE}")


if __name__ == "__main__":
    main()
