"""``gramscope analyze``: spectra of a checkpoint."""

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gramscope import spectra
from gramscope.base.errors import InputError
from gramscope.cli.checkpoint import read_checkpoint
from gramscope.cli.printed import json_line
from gramscope.store.meta import check_not_of_a_run
from gramscope.store.store_errors import disk_trouble

SHOWN = 30  # rows of the table, and names left out for one reason, that a terminal gets; --json has all


def analyze_checkpoint(path: Path, convention: str, out: Path | None, as_json: bool) -> None:
    if convention not in ("gramscope", "weightwatcher"):
        raise InputError(f'convention must be "gramscope" or "weightwatcher", got {convention!r}.')
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
        console.print(_table(frame, path))
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
    temporary = out.with_name(out.name + ".part")
    with disk_trouble(f"writing the table {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise InputError(f"--out must be a file, but {out} is a folder. Pass e.g. {out / 'spectra.csv'}.")
        frame.to_csv(temporary, index=False)
        temporary.replace(out)


def _print_reasons(frame: pd.DataFrame, console: Console) -> None:
    """Why a row has no numbers, once for all rows with the same reason."""
    if "reason" in frame:
        shown = frame.head(SHOWN)
        for reason, names in _by_reason(shown["name"], shown["reason"]).items():
            console.print(f"{', '.join(names)}: {reason}", style="dim", markup=False)


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


def _table(frame: pd.DataFrame, path: Path) -> Table:
    columns = ("name", "shape", "alpha", "shuffled_alpha", "n_tail", "spikes", "stable_rank", "verdict")
    wanted = [c for c in columns if c in frame]
    table = Table(title=f"Spectra of {path.name}", title_justify="left")
    for column in wanted:
        left = column in ("name", "verdict")
        table.add_column(column.replace("_", " "), justify="left" if left else "right", overflow="fold")
    for _, row in frame.head(SHOWN).iterrows():
        table.add_row(*(escape(f"{v:.3g}" if isinstance(v := row[c], float) else str(v)) for c in wanted))
    if len(frame) > SHOWN:
        table.caption = f"{len(frame) - SHOWN} more rows: --out spectra.csv has them all"
    return table
