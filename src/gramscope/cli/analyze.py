"""``gramscope analyze``: spectra of a checkpoint."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gramscope import spectra
from gramscope.base.errors import InputError

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
        temporary = out.with_name(out.name + ".part")
        frame.to_csv(temporary, index=False)
        temporary.replace(out)
    if as_json:
        rows = json.loads(frame.to_json(orient="records"))
        print(json.dumps({"weights": rows, "skipped": json.loads(left_out.to_json(orient="records"))}))
        return
    console = Console()
    console.print(_table(frame, path))
    if len(left_out):
        listed = ", ".join(f"{n} ({r})" for n, r in zip(left_out["name"], left_out["reason"], strict=True))
        console.print(f"Left out: {listed}", style="dim")
    if out is not None:
        console.print(f"Table: [bold]{out}[/bold]", soft_wrap=True)


def _table(frame: pd.DataFrame, path: Path) -> Table:
    wanted = [c for c in ("name", "shape", "alpha", "D", "n_tail", "stable_rank", "entropy", "verdict") if c in frame]
    table = Table(title=f"Spectra of {path.name}", title_justify="left")
    for column in wanted:
        table.add_column(column, justify="left" if column in ("name", "verdict") else "right")
    for _, row in frame.head(SHOWN).iterrows():
        table.add_row(*(f"{v:.3g}" if isinstance(v := row[c], float) else str(v) for c in wanted))
    if len(frame) > SHOWN:
        table.caption = f"{len(frame) - SHOWN} more rows: --out spectra.csv has them all"
    return table
