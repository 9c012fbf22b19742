"""``gramscope analyze``: spectra of a checkpoint."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from gramscope import spectra
from gramscope.base.errors import InputError
from gramscope.cli.printed import strict_json
from gramscope.store.errors import disk_trouble
from gramscope.store.meta import check_not_of_a_run

SHOWN = 30  # rows of the table that a terminal gets; --out and --json have all


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Tensors by name, without running any code that the file may hold."""
    if not path.exists():
        raise InputError(f"{path} must be a checkpoint, but there is no such file.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return load_file(str(path))
        except Exception as error:
            raise InputError(f"{path} must be a safetensors file, but it cannot be read: {error}.") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Torch's own message advises weights_only=False, which runs whatever code the file holds: not repeated.
        raise InputError(f"{path} must be a checkpoint of plain tensors, but {_reason(path, error)}") from error
    tensors = _tensors(found)
    if not tensors:
        raise InputError(f"{path} must hold tensors by name, got {type(found).__name__} without any.")
    return tensors


def _reason(path: Path, error: Exception) -> str:
    """Why a file could not be read, in our words."""
    if isinstance(error, OSError):
        return f"it cannot be opened: {error.strerror or type(error).__name__}."
    if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
        return (
            "it holds other objects, which reading would have to run code for (it is read with weights_only=True). "
            "Save model.state_dict() instead of the model, or write safetensors."
        )
    return "it is damaged, cut short, or no file of torch.save. Save it again, or write safetensors."


def _tensors(found: Any, prefix: str = "") -> dict[str, Tensor]:
    """A state dict, also where it lies inside a training checkpoint ("model", "state_dict", ...)."""
    if not isinstance(found, dict):
        return {}
    for key in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(found.get(key), dict):
            return _tensors(found[key])
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def analyze_checkpoint(path: Path, convention: str, out: Path | None, as_json: bool) -> None:
    if convention not in ("gramscope", "weightwatcher"):
        raise InputError(f'convention must be "gramscope" or "weightwatcher", got {convention!r}.')
    frame = spectra.analyze(read_checkpoint(path), convention=convention)  # type: ignore[arg-type]
    left_out = spectra.skipped(frame)
    if out is not None:
        _write(frame, out)
    if as_json:
        rows = json.loads(frame.to_json(orient="records"))
        print(strict_json({"weights": rows, "skipped": json.loads(left_out.to_json(orient="records"))}))
        return
    console = Console()
    if len(frame):
        console.print(_table(frame, path))
        _print_reasons(frame, console)
    else:
        console.print(f"No spectra: {path.name} holds no weight matrix, only what is left out below.", markup=False)
    if len(left_out):
        listed = ", ".join(f"{n} ({r})" for n, r in zip(left_out["name"], left_out["reason"], strict=True))
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
    reasons: dict[str, list[str]] = {}
    if "reason" in frame:
        shown = frame.head(SHOWN)
        for name, reason in zip(shown["name"], shown["reason"], strict=True):
            if isinstance(reason, str) and reason:
                reasons.setdefault(reason, []).append(str(name))
    for reason, names in reasons.items():
        console.print(f"{', '.join(names)}: {reason}", style="dim", markup=False)


def _table(frame: pd.DataFrame, path: Path) -> Table:
    wanted = [c for c in ("name", "shape", "alpha", "D", "n_tail", "stable_rank", "entropy", "verdict") if c in frame]
    table = Table(title=f"Spectra of {path.name}", title_justify="left")
    for column in wanted:
        table.add_column(column, justify="left" if column in ("name", "verdict") else "right")
    for _, row in frame.head(SHOWN).iterrows():
        table.add_row(*(escape(f"{v:.3g}" if isinstance(v := row[c], float) else str(v)) for c in wanted))
    if len(frame) > SHOWN:
        table.caption = f"{len(frame) - SHOWN} more rows: --out spectra.csv has them all"
    return table
