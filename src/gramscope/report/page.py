"""The page: one HTML file with its data, its script and its styles inside."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gramscope import __version__
from gramscope.base.errors import InputError
from gramscope.base.json_values import Json
from gramscope.diagnose.finding import Diagnosis
from gramscope.diagnose.run_diagnosis import diagnose
from gramscope.report import swept
from gramscope.report.advice import TOPICS
from gramscope.report.figure import Panel
from gramscope.report.panels import Absent, all_panels, all_runs
from gramscope.report.regimes import RULE, regime
from gramscope.report.run_sources import Sources, open_all, views_of
from gramscope.report.runs_table import RunsTable, runs_table
from gramscope.report.summary import Words, compared, in_words
from gramscope.report.svg import write_svgs
from gramscope.report.view import RunView
from gramscope.store import Run
from gramscope.store.files import write_file
from gramscope.store.meta import check_not_of_a_run
from gramscope.store.store_errors import disk_trouble

HERE = Path(str(files("gramscope.report")))
SCRIPTS = ("vendor/plotly-cartesian.min.js", "templates/runs.js", "templates/page.js")
OPEN_PANELS = 5  # the first ones; a click opens another
FEW_RUNS = 8  # up to so many a page has a card and drawings for each


def report(
    runs: Sources,
    out: str | os.PathLike[str] = "report.html",
    *,
    svg_dir: str | os.PathLike[str] | None = None,
    title: str = "gramscope report",
) -> Path:
    """Write one page about one run or several, to be read offline, and return its path.

    The page says in words whether the run is lazy or rich, which layer learns and what changed when, and draws all that
    was recorded; panels without data are listed as left out. It is written whole or not at all, after the figures.

    Args:
        runs: a run directory, a folder of runs, a pattern ("runs/*"), an opened run (:func:`gramscope.store.open_run`),
            or several of them. Up to eight are drawn in full; of more there is a table with small drawings.
        out: the file; its folder is made if need be.
        svg_dir: a folder for the figures as SVG files as well, one for each drawing (at the last position of a slider).
        title: of the page.

    Example:
        >>> import tempfile
        >>> from gramscope.store import RunWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RunWriter.create(folder.name + "/a") as writer:
        ...     for step in (0, 10, 20):
        ...         _ = writer.append(step, {"loss": 1.0 / (1 + step), "kernel/drift": 0.2 * step})
        >>> page = report(folder.name + "/a", folder.name + "/report.html")
        >>> "The run is rich" in page.read_text(encoding="utf-8")
        True
        >>> folder.cleanup()
    """
    path = Path(out)
    if path.is_dir():
        raise InputError(f"out must be a file, got the directory {path}. Pass e.g. {path / 'report.html'}.")
    check_not_of_a_run(path, "out")
    if svg_dir is not None and Path(svg_dir).exists() and not Path(svg_dir).is_dir():
        raise InputError(f"svg_dir must be a folder, but {svg_dir} is a file. Pass another path.")
    content = gather(open_all(runs))
    text = rendered(content, title)
    # The page comes last: where it is new, all that was asked for is there.
    if svg_dir is not None:
        with disk_trouble(f"writing the figures into {svg_dir}"):
            write_svgs(content.panels, Path(svg_dir))
    with disk_trouble(f"writing the report {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    return path


@dataclass(frozen=True, eq=False)
class Content:
    """All that the page tells, before it is HTML; ``table`` is None of a single run."""

    views: Sequence[RunView]
    panels: Sequence[Panel]
    absent: Sequence[Absent]
    words: Sequence[Words]
    compared: Sequence[str]
    table: RunsTable | None
    diagnoses: Sequence[Diagnosis]

    @property
    def many(self) -> bool:
        """Whether the runs are too many for a card and drawings of each: the table then leads."""
        return len(self.views) > FEW_RUNS


def gather(runs: Sequence[Run]) -> Content:
    """Read the runs and build panels and words."""
    views = views_of(runs)
    panels, absent = all_panels(views) if len(views) <= FEW_RUNS else (_of_many(views), [])
    diagnoses = [diagnose(run) for run in runs]
    table = runs_table(views, diagnoses) if len(views) > 1 else None
    many = len(views) > FEW_RUNS
    drawn = swept.panel(table, pairs_only=many) if table else None
    # The words come last: drawing has found out which arrays cannot be read.
    words = [in_words(view) for view in views]
    drawings = [*([drawn] if drawn else []), *panels]
    beside = compared(views, ranked_by_result=not many) + (swept.best_runs(table) if table and many else [])
    return Content(views, drawings, absent, words, beside, table, diagnoses)


def _of_many(views: Sequence[RunView]) -> list[Panel]:
    drawn = all_runs.panel(views, {view.index: regime(view) for view in views})
    return [drawn] if drawn else []


def rendered(content: Content, title: str, *, live_ms: int = 0, version: str = "", status: str = "") -> str:
    """The whole page; with ``live_ms`` it asks its server for news at this interval."""
    data = {**payload(content), "version": version, "status": status}
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            **_fragment_names(content),
            title=title,
            live=live_ms,
            policy=policy(bool(live_ms)),
            version=__version__,
            made=datetime.now(UTC).isoformat(sep=" ", timespec="minutes"),
            runs=[_run_line(view) for view in content.views],
            css=_part("templates/page.css"),
            scripts=[_part(name) for name in SCRIPTS],
            data=script_json(data),
        )
    )


def fragment(content: Content) -> str:
    """What a growing run replaces: navigation, words and panels."""
    return _environment().get_template("panels.html.j2").render(**_fragment_names(content))


def payload(content: Content) -> dict[str, Json]:
    """The figures and the names of the runs, as the page's script reads them."""
    return {
        "runs": [{"name": view.name, "index": view.index} for view in content.views],
        "panels": [panel.json() for panel in content.panels],
        "table": content.table.json() if content.table else None,
        "colours": all_runs.COLOURS,
        "log_steps": any(_crowded(view.steps) for view in content.views),
    }


def _crowded(steps: Sequence[int]) -> bool:
    """Whether most looks came early, as a logarithmic schedule has it: then the page starts with a logarithmic axis."""
    return len(steps) > 4 and steps[len(steps) // 2] < 0.15 * steps[-1]


def script_json(value: Json) -> str:
    """Strict JSON that no name can break out of: inside a script element only '<' could end it.

    >>> script_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(live: bool) -> str:
    """Only our scripts may run, by their hashes; nothing may be fetched, but for news of a live run."""
    hashes = " ".join(_hash(_part(name)) for name in SCRIPTS)
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:{connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _fragment_names(content: Content) -> Mapping[str, object]:
    return {
        "panels": content.panels,
        "absent": content.absent,
        "words": content.words,
        "compared": content.compared,
        "diagnoses": content.diagnoses,
        "rule": RULE,
        "topics": TOPICS,
        "table": content.table,
        "many": content.many,
        "few_runs": FEW_RUNS,
        "open_panels": OPEN_PANELS,
    }


def _run_line(view: RunView) -> Mapping[str, object]:
    return {
        "name": view.name,
        "index": view.index,
        "model": view.meta.get("model", "unknown model"),
        "records": "1 record" if len(view.steps) == 1 else f"{len(view.steps):,} records",
        "when": str(view.meta.get("created", "unknown date"))[:16].replace("T", " "),
    }


@cache
def _part(name: str) -> str:
    # Newlines must reach the page as they are hashed, whatever the checkout made of them; browsers read \r\n as \n.
    return (HERE / name).read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
