"""``gramscope analyze``: spectra of a checkpoint."""

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markup import escape

from gramscope import spectra
from gramscope.base.checks import check_choice
from gramscope.base.errors import InputError
from gramscope.cli.checkpoint import read_checkpoint
from gramscope.cli.printed import aligned, json_line
from gramscope.store.files import write_file
from gramscope.store.meta import check_not_of_a_run
from gramscope.store.store_errors import disk_trouble

SHOWN = 30  # rows of the table, and names left out for one reason, that a terminal gets; --json has all


def analyze_checkpoint(path: Path, convention: str, out: Path | None, as_json: bool) -> None:
    check_choice(convention, "--convention", ("gramscope", "weightwatcher"))
    read = read_checkpoint(path)
    frame = spectra.analyze(read.tensors, convention=convention)  # type: ignore[arg-type]
    frame.attrs["skipped"] += [{"name": s.name, "shape": s.shape, "reason": s.reason} for s in read.left_out]
    left_out = spectra.skipped(frame)
    if out is not None:
        _write(frame, out)
    if as_json:
        rows = json.loads(frame.to_json(orient="records"))
        print(json_line({"weights": rows, "skipped": json.loads(left_out.to_json(orient="records"))}))
        return
    console = Console()
    if len(frame):
        print(_table(frame, path, console.width))
        _print_reasons(frame, console)
    else:
        console.print(f"No spectra: {path.name} holds no weight matrix, only what is left out below.", markup=False)
    if len(left_out):
        told = _by_reason(left_out["name"], left_out["reason"])
        listed = "; ".join(f"{_first(names)} ({reason})" for reason, names in told.items())
        console.print(f"Left out: {listed}", style="dim", markup=False)
    if out is not None:
        console.print(f"Table: [bold]{escape(str(out))}[/bold]", soft_wrap=True)


def _write(frame: pd.DataFrame, out: Path) -> None:
    check_not_of_a_run(out, "--out")
    with disk_trouble(f"writing the table {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise InputError(f"--out must be a file, but {out} is a folder. Pass e.g. {out / 'spectra.csv'}.")
        write_file(out, lambda free: frame.to_csv(free, index=False))


def _print_reasons(frame: pd.DataFrame, console: Console) -> None:
    """Why a row has no numbers, once for all rows with the same reason."""
    if "reason" in frame:
        shown = frame.head(SHOWN)
        for reason, names in _by_reason(shown["name"], shown["reason"]).items():
            whose = "all weights" if 1 < len(names) == len(shown) else _first(names)
            console.print(f"{whose}: {reason}", style="dim", markup=False)


def _by_reason(names: Iterable[object], reasons: Iterable[object]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in zip(names, reasons, strict=True):
        if isinstance(reason, str) and reason:
            found.setdefault(reason, []).append(str(name))
    return found


def _first(names: list[str]) -> str:
    """Not all names of an optimiser's moments, which may be thousands."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _table(frame: pd.DataFrame, path: Path, width: int) -> str:
    columns = {
        "shape": "shape", "alpha": "alpha", "shuffled_alpha": "shuffled", "n_tail": "tail", "spikes": "spikes",
        "stable_rank": "rank", "verdict": "verdict",
    }  # fmt: skip
    wanted = {column: title for column, title in columns.items() if column in frame}
    shown = frame.head(SHOWN)
    rows = [(row["name"], [_cell(row[column]) for column in wanted]) for _, row in shown.iterrows()]
    lines = [f"Spectra of {path.name}", *aligned(list(wanted.values()), rows, width)]
    if len(frame) > SHOWN:
        lines.append(f"{len(frame) - SHOWN} more rows: --out spectra.csv has them all")
    return "\n".join(lines)


def _cell(value: object) -> str:
    """A number to three digits, a shape as 96x256, a dash where there is none."""
    if isinstance(value, float):
        return "-" if value != value else f"{value:.3g}"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
