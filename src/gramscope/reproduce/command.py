"""What ``gramscope reproduce`` does."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.reproduce.experiments import (
    FIGURE_FILE,
    PAGE_FILE,
    QUICK_SEEDS,
    RESULT_FILE,
    TABLE_FILE,
    all_experiments,
    experiments_folder,
    find_experiment,
    missing_need,
)
from gramscope.reproduce.running import Options, run_experiment
from gramscope.reproduce.writing import HEAD, cells, summary, write_result

COLOURS = {"agrees": "green", "differs": "red"}


def list_experiments(folder: Path | None, quiet: bool) -> JSONObject:
    """Print which experiments there are and what each needs."""
    found = []
    table = Table(title="Experiments", title_justify="left")
    for heading in ("name", "what", "needs"):
        table.add_column(heading, overflow="fold")
    for one in all_experiments(experiments_folder(folder)):
        missing, made = missing_need(one.needs), (one.folder / RESULT_FILE).exists()
        found.append({
            "name": one.name, "title": one.title, "question": one.question, "needs": one.needs, "missing": missing,
            "result": made,
        })  # fmt: skip
        needs = one.needs.replace(",", ", ")
        if missing:
            needs += " (not found)" if missing_need(one.quick_needs) else " (not found; not for --quick)"
        table.add_row(one.name, one.title if made else f"{one.title} (no result yet)", needs)
    console = Console(quiet=quiet)
    console.print(table)
    console.print("Results: experiments/NAME/RESULT.md. Run one: gramscope reproduce NAME --quick", markup=False)
    return {"experiments": found}


def reproduce(
    name: str, *, experiments: Path | None, quick: bool, seeds: int | None, device: str, jobs: int, out: Path | None,
    publish: bool, only_write: bool, quiet: bool,
) -> JSONObject:  # fmt: skip
    """Run an experiment, compare it with what was published, and write table, figure, text and page."""
    experiment = find_experiment(experiments_folder(experiments), name)
    if publish and quick:
        raise InputError("--publish must not be used with --quick: committed results are those of the full version.")
    options = Options(quick, seeds or (QUICK_SEEDS if quick else experiment.seeds), device, jobs, only_write=only_write)
    folder = out or Path("runs") / "reproduce" / (f"{name}-quick" if quick else name)
    console = Console(quiet=quiet)
    outcome = run_experiment(experiment, options, folder, console)
    failed = [f"{state.name}: {state.error}" for state in outcome.failed]
    verdicts = write_result(experiment, outcome.table, outcome.record, failed, folder, keep=experiment.folder)
    if publish:
        for file in (TABLE_FILE, FIGURE_FILE, RESULT_FILE):
            if (folder / file).exists():
                (experiment.folder / file).write_bytes((folder / file).read_bytes())
    _show(experiment.title, [cells(one) for one in verdicts], console)
    console.print(summary(verdicts), markup=False)
    if quick:
        console.print("Quick version, smaller than what was published: its numbers are not comparable.", soft_wrap=True)
    for line in failed:
        console.print(f"failed: {line}", markup=False, soft_wrap=True)
    console.print(f"Result: {folder / RESULT_FILE}, page: {folder / PAGE_FILE}", markup=False, soft_wrap=True)
    rows = [{**dict(zip(HEAD, cells(one), strict=True)), "mean": one.mean, "sd": one.sd} for one in verdicts]
    return {"experiment": name, "out": str(folder), "rows": rows, "failed": failed}


def _show(title: str, rows: list[list[str]], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for heading in HEAD[:-1]:  # sources stand in RESULT.md
        table.add_column(heading, overflow="fold")
    for row in rows:
        colour = COLOURS.get(row[5], "")
        table.add_row(*row[:5], f"[{colour}]{row[5]}[/{colour}]" if colour else row[5])
    console.print(table)
