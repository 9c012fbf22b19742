"""Snapshots in files: all tensors as safetensors, everything else as JSON in the file's header."""

import json
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.capture.sites import Frame, LookupSite, OuterSite, RowSite, Site, Snapshot

SCHEMA = 1
KEY = "gramscope.snapshot"


def save_snapshot(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write a snapshot, whole or not at all. Inputs of convolutions are written as unfolded patches."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {"outputs": _own(snapshot.outputs)}
    sites = [_described(place, site, tensors) for place, site in enumerate(snapshot.sites)]
    header = {
        "schema": SCHEMA,
        "directions": snapshot.directions,
        "parameters": {name: list(shape) for name, shape in snapshot.parameters.items()},
        "frozen": snapshot.frozen,
        "fallback": snapshot.fallback,
        "unreached": snapshot.unreached,
        "sites": sites,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={KEY: json.dumps(header)})
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
            header = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} must be a file that Snapshot.save wrote, but it is not, or is damaged.") from error
    if header["schema"] > SCHEMA:
        raise InputError(
            f"{path} was written with schema {header['schema']} of snapshots, but this gramscope knows schemas up to "
            f"{SCHEMA}. Upgrade: pip install --upgrade gramscope."
        )
    return Snapshot(
        sites=tuple(_restored(place, fields, tensors) for place, fields in enumerate(header["sites"])),
        outputs=tensors["outputs"],
        directions=header["directions"],
        parameters={name: torch.Size(shape) for name, shape in header["parameters"].items()},
        frozen=tuple(header["frozen"]),
        fallback=tuple(header["fallback"]),
        unreached=tuple(header["unreached"]),
    )


def _described(place: int, site: Site, tensors: dict[str, Tensor]) -> JSONObject:
    """What is no tensor of a site; its tensors go into ``tensors``, under its number."""
    fields: JSONObject = {"name": site.name, "rule": site.rule, "kind": type(site).__name__}
    if site.frame is not None:
        fields["frame"] = list(site.frame.shape)
        tensors[f"{place}.frame"] = _own(site.frame.entries)
    tensors[f"{place}.held"] = _own(site.held)
    if isinstance(site, OuterSite):
        tensors[f"{place}.inputs"] = _own(site.inputs)
        fields |= {"fan_in": site.fan_in, "axes": site.axes, "order": site.order}
    elif isinstance(site, LookupSite):
        tensors[f"{place}.ids"] = _own(site.ids)
        fields["table"] = site.table
    return fields


def _restored(place: int, fields: JSONObject, tensors: dict[str, Tensor]) -> Site:
    frame = Frame(tensors[f"{place}.frame"], tuple(fields["frame"])) if "frame" in fields else None
    named: JSONObject = {"name": fields["name"], "rule": fields["rule"], "frame": frame}
    held = tensors[f"{place}.held"]
    if fields["kind"] == "OuterSite":
        named |= {"fan_in": fields["fan_in"], "axes": tuple(fields["axes"]), "order": tuple(fields["order"])}
        return OuterSite(**named, signals=held, inputs_of=tensors[f"{place}.inputs"].__getitem__)
    if fields["kind"] == "LookupSite":
        return LookupSite(**named, ids=tensors[f"{place}.ids"], signals=held, table=fields["table"])
    return RowSite(**named, gradient=held)


def _own(tensor: Tensor) -> Tensor:
    """A tensor with memory of its own, as the format wants it."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
