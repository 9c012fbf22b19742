"""Snapshots in files: all tensors as safetensors, everything else as JSON in the file's header."""

import json
import os
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.capture.sites import Frame, LookupSite, OuterSite, RowSite, Snapshot

SCHEMA = 1
SNAPSHOT, TENSOR, KIND = "gramscope.snapshot", "gramscope.tensor", "gramscope.kind"
KINDS: dict[str, type] = {kind.__name__: kind for kind in (Snapshot, OuterSite, LookupSite, RowSite, Frame)}


def save_snapshot(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write a snapshot, whole or not at all. Inputs of convolutions are written as unfolded patches."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    about = json.dumps(snapshot, default=partial(_encoded, tensors))
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={SNAPSHOT: about, "schema": str(SCHEMA)})
        os.replace(temporary, target)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{target} must be a file that can be written, but {error}. Check its folder and the disk's space."
        ) from error
    finally:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            temporary.unlink(missing_ok=True)


def load_snapshot(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Snapshot:
    """Read a snapshot that :func:`save_snapshot` wrote."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise InputError(f"{path} must be a file that Snapshot.save wrote, but there is no such file.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            text = file.metadata() or {}
            about, schema = text[SNAPSHOT], int(text["schema"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} must be a file that Snapshot.save wrote, but it is not, or is damaged.") from error
    if schema > SCHEMA:
        raise InputError(
            f"{path} was written with schema {schema} of snapshots, but this gramscope knows schemas up to {SCHEMA}. "
            "Upgrade: pip install --upgrade gramscope."
        )
    snapshot: Snapshot = json.loads(about, object_hook=partial(_decoded, tensors))
    return snapshot


def _encoded(tensors: dict[str, Tensor], part: Any) -> JSONObject:
    """A part of a snapshot as JSON takes it. A tensor goes into ``tensors``, with memory of its own."""
    if isinstance(part, Tensor):
        name, whole = str(len(tensors)), part.detach().resolve_conj().resolve_neg()
        tensors[name] = whole.clone(memory_format=torch.contiguous_format)
        return {TENSOR: name}
    state = {KIND: type(part).__name__, **{field.name: getattr(part, field.name) for field in fields(part)}}
    return {**state, "inputs_of": part.inputs} if isinstance(part, OuterSite) else state


def _decoded(tensors: dict[str, Tensor], about: JSONObject) -> Any:
    """The inverse; JSON has no tuples."""
    if TENSOR in about:
        return tensors[about[TENSOR]]
    state = {name: tuple(value) if isinstance(value, list) else value for name, value in about.items()}
    if KIND not in state:
        return {name: torch.Size(shape) for name, shape in state.items()}  # of the parameters
    kind = KINDS[str(state.pop(KIND))]
    if kind is OuterSite:
        state["inputs_of"] = state["inputs_of"].__getitem__
    return kind(**state)
