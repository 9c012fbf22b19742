"""``RESULT.md``, ``result.csv``, ``figure.png`` and the page of one experiment."""

import base64
import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from gramscope.base.json_values import JSONObject
from gramscope.reproduce.expected import UNPUBLISHED, read_expected
from gramscope.reproduce.experiments import FIGURE_FILE, FINDINGS, PAGE_FILE, RESULT_FILE, TABLE_FILE, Experiment
from gramscope.reproduce.verdicts import AGREES, CONTROL, DIFFERS, Verdict, judge
from gramscope.store.files import write_file

MARKER = "<!-- Below this line the text is written by hand; the command keeps it. -->"
HEAD = ("quantity", "published", "ours ± sd", "95 % interval", "seeds", "verdict", "source")
DIGITS = "%.8g"  # of numbers in result.csv


def write_result(
    experiment: Experiment, table: pd.DataFrame, record: JSONObject, failed: Sequence[str], out: Path,
    keep: Path | None = None,
) -> list[Verdict]:  # fmt: skip
    """Write table, figure, ``RESULT.md`` and page into ``out``; hand-written text comes from ``keep``, or from ``out``.

    All of it is made of the table as it is in ``result.csv``, so that anyone can get it from that file again.
    """
    record = {**record, "jobs": len(table), "job_seconds": float(table["seconds"].sum()) if len(table) else 0.0}
    text = table.to_csv(index=False, float_format=DIGITS, lineterminator="\n")
    write_file(out / TABLE_FILE, text.encode())
    table = read_table(out / TABLE_FILE) if len(table) else table
    verdicts = judge(table, read_expected(experiment.folder))
    drawn = _draw(experiment, table, out / FIGURE_FILE)
    notes = hand_written((keep or out) / RESULT_FILE)
    told = _findings(experiment, table)
    result = result_text(experiment, record, verdicts, failed, drawn) + told
    write_file(out / RESULT_FILE, f"{result}\n{MARKER}\n{notes}".encode())
    page = _page(experiment, record, verdicts, failed, told + notes, out / FIGURE_FILE if not drawn else None)
    write_file(out / PAGE_FILE, page.encode())
    return verdicts


def read_table(path: Path) -> pd.DataFrame:
    """``result.csv`` with the types that its columns had."""
    # "None" and "null" may be names in a case; an empty field is a number that the job did not give.
    return pd.read_csv(path, keep_default_na=False, na_values=["", "nan", "NaN"])


def hand_written(path: Path) -> str:
    """What follows the marker line of a ``RESULT.md``; empty if there is none."""
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8").partition(f"{MARKER}\n")[2]


def _draw(experiment: Experiment, table: pd.DataFrame, path: Path) -> str:
    """Draw the figure; why not, if it cannot be drawn."""
    if not len(table):
        return "no job ended well, so that there is nothing to draw"
    try:
        import matplotlib as mpl
    except ImportError:
        return "the figure needs matplotlib: pip install 'gramscope[plot]'"
    mpl.use("Agg")
    fresh = path.with_name(f".{path.name}")  # ends in .png, from which matplotlib takes the format
    experiment.load().figure(table, fresh)
    fresh.replace(path)
    return ""


def _findings(experiment: Experiment, table: pd.DataFrame) -> str:
    """What the experiment's own ``findings(table)`` says over all jobs; empty if it has none."""
    tell = getattr(experiment.load(), FINDINGS, None)
    return f"\n{str(tell(table)).strip()}\n" if callable(tell) and len(table) else ""


def result_text(
    experiment: Experiment, record: JSONObject, verdicts: Sequence[Verdict], failed: Sequence[str],
    no_figure: str,
) -> str:  # fmt: skip
    """``RESULT.md`` down to the marker line."""
    lines = [f"# {experiment.title}", "", experiment.question, ""]
    lines += [f"- {name}: {value}" for name, value in facts(record)]
    lines += ["", summary(verdicts), "", *markdown_table(verdicts), ""]
    if failed:
        lines += ["Jobs that failed or were not run:", "", *(f"- {line}" for line in failed), ""]
    lines += [f"No figure: {no_figure}." if no_figure else f"![{experiment.title}]({FIGURE_FILE})", ""]
    return "\n".join(lines)


def facts(record: JSONObject) -> list[tuple[str, str]]:
    """What made the result, in words: the last command, and machines and commits of all calls that computed jobs."""
    calls = record.get("calls", [])
    if not calls:
        return [("made by", "no call that computed anything")]
    last = calls[-1]
    quick = " (quick version: smaller than the published experiment)" if record.get("quick") else ""
    return [
        ("command", f"`{last['command']}`{quick}"),
        ("commit", _all(calls, "commit")),
        ("machine", _all(calls, "machine")),
        ("versions", ", ".join(f"{name} {number}" for name, number in last["versions"].items())),
        ("wall time", _wall_time(record)),
        ("date", str(last["begun"])[:10]),
    ]


def _wall_time(record: JSONObject) -> str:
    jobs = f"{record['jobs']} jobs, {record['job_seconds']:.0f} s of them all together"
    walls = [call["wall_seconds"] for call in record["calls"]]
    if None in walls:
        return f"not recorded, since a call was stopped before its end; {jobs}"
    return f"{sum(walls):.0f} s for {jobs}"


def _all(calls: Sequence[JSONObject], key: str) -> str:
    """The values of all calls, each once."""
    return "; ".join(dict.fromkeys(str(call[key]) for call in calls))


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many agree.

    >>> summary([])
    'Nothing to compare with.'
    """
    words = [one.verdict for one in verdicts]
    if not words:
        return "Nothing to compare with."
    published = sum(one.expected.published is not None and not one.expected.control for one in verdicts)
    told = f"Of {published} published numbers {words.count(AGREES)} agree and {words.count(DIFFERS)} differ."
    if not published:
        told = "The source gives no number to compare with."
    kinds = [word if not word.startswith(CONTROL) else "controls, not counted" for word in words]
    others = {word: kinds.count(word) for word in dict.fromkeys(kinds) if word not in (AGREES, DIFFERS)}
    return told + "".join(f" {count} {word}." for word, count in others.items())


def markdown_table(verdicts: Sequence[Verdict]) -> list[str]:
    """The rows of the table, each with why its tolerance is what it is below."""
    rows = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    rows += [f"| {' | '.join(cells(one))} |" for one in verdicts]
    whys: dict[str, list[str]] = {}
    for one in verdicts:
        whys.setdefault(one.expected.why, []).append(quantity(one))
    return [*rows, "", "Tolerances:", "", *(f"- {', '.join(names)}: {why}" for why, names in whys.items())]


def cells(one: Verdict) -> list[str]:
    sd = f" ± {short(one.sd)}" if math.isfinite(one.sd) else ""
    low, high = one.interval
    interval = f"{short(low)} to {short(high)}" if math.isfinite(low) else "–"
    return [quantity(one), _published(one), f"{short(one.mean)}{sd}", interval, str(one.seeds), one.verdict,
            one.expected.source]  # fmt: skip


def quantity(one: Verdict) -> str:
    case = ", ".join(f"{key} {value}" for key, value in one.expected.case.items())
    return f"{one.expected.name} ({case})" if case else one.expected.name


def _published(one: Verdict) -> str:
    value = one.expected
    if value.published is None:
        return UNPUBLISHED
    if value.kind.startswith("at "):
        return f"{value.kind} {short(value.published)}" + (f" ∓ {short(value.tolerance)}" if value.tolerance else "")
    tolerance = f"{100 * value.tolerance:g} %" if value.kind == "relative" else short(value.tolerance)
    return f"{short(value.published)} (± {tolerance})"


def short(value: float) -> str:
    """A number for people, three figures.

    >>> short(0.04912), short(22949.0), short(0.99999949), short(float("nan"))
    ('0.0491', '2.29e+04', '0.99999949', 'nan')
    """
    if 0.99 <= abs(value) < 1 - 1e-8:  # the digits behind the nines are those that tell
        return f"{value:.{1 - math.floor(math.log10(1 - abs(value)))}f}".rstrip("0")
    return f"{value:.3g}"


# The page -----------------------------------------------------------------------------------------

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse }
td, th { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: left }
img { max-width: 100% }
.agrees { color: #17692f }
.differs { color: #a1260d }
pre { white-space: pre-wrap; font: inherit }
"""


def _page(
    experiment: Experiment, record: JSONObject, verdicts: Sequence[Verdict], failed: Sequence[str], notes: str,
    figure: Path | None,
) -> str:  # fmt: skip
    """One HTML file that opens offline."""
    page = io.StringIO()
    page.write(f"<!doctype html><meta charset='utf-8'><title>{escape(experiment.title)}</title><style>{STYLE}</style>")
    page.write(f"<h1>{escape(experiment.title)}</h1><p>{escape(experiment.question)}</p>")
    page.write("".join(f"<div>{escape(name)}: {escape(value.strip('`'))}</div>" for name, value in facts(record)))
    page.write(
        f"<p>{escape(summary(verdicts))}</p><table><tr>{''.join(f'<th>{escape(name)}</th>' for name in HEAD)}</tr>"
    )
    for one in verdicts:
        inner = "".join(f"<td>{escape(cell)}</td>" for cell in cells(one))
        page.write(f"<tr class='{escape(one.verdict)}'>{inner}</tr>")
    page.write("</table>")
    page.write("".join(f"<div>failed: {escape(line)}</div>" for line in failed))
    if figure is not None and figure.exists():
        picture = base64.b64encode(figure.read_bytes()).decode()
        page.write(f"<p><img alt='{escape(experiment.title, quote=True)}' src='data:image/png;base64,{picture}'></p>")
    page.write(f"<pre>{escape(notes)}</pre>\n")
    return page.getvalue()
