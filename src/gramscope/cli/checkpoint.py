"""The tensors of a checkpoint: those of its state dict, and all others with the reason why they are left out.

What is in a file tells its kind, not its name; no code that it may hold is run.
"""

import json
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.spectra.weights import Skipped

STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")  # what trainers call it, the first one first
OPTIMISER = "the state of an optimiser, no weight of the network"
KINDS = "torch.save, safetensors, TorchScript, .npz and .npy"
CUT_SHORT = "it is cut short or damaged. Copy or save it again."
PICKLE = (
    "it is a pickle, and to read one may run any code. If you trust it, load it in Python and pass its dict of arrays "
    "to gs.spectra.analyze, or save it as safetensors or .npz."
)
OTHERS = {
    b"\x1f\x8b": "it is compressed with gzip. Unpack it first, with gunzip.",
    b"\x89HDF": "it is an HDF5 file (Keras). Save its weights as safetensors or .npz.",
    b"GGUF": "it is a GGUF file. Take the safetensors that it was made from.",
}
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch.save began before they were zip archives
# Beside the weights in the folder of a trainer.
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
# Of a folder the first of these that it holds.
IN_FOLDERS = ((".safetensors",), (".bin",), (".pt", ".pth", ".ckpt", ".jit", ".npz"))


@dataclass
class Checkpoint:
    """Every tensor of a file, each under a name of its own: to analyse, or left out."""

    left_out: list[Skipped] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def take(self, name: str, tensor: Tensor, reason: str) -> None:
        """A tensor, left out where there is a ``reason``. {"a": {"b": t}, "a.b": u} is two, so they get two names."""
        numbered = (f"{name} ({number})" for number in count(2))
        while name in self._names:
            name = next(numbered)
        self._names.add(name)
        if reason:
            self.left_out.append(Skipped(name, tuple(tensor.shape), reason))
        else:
            self.tensors[name] = tensor


def read_checkpoint(path: Path) -> Checkpoint:
    """Tensors by name, without running any code that the file may hold."""
    if not path.exists():
        raise InputError(f"{path} must be a checkpoint, but there is no such file.")
    found = load(path)
    read = _sorted_out(found) if isinstance(found, dict) else Checkpoint()
    if not read.tensors and read.left_out:
        only = read.left_out[0].reason
        raise InputError(f"{path} must hold weights, but holds only {only}. Save model.state_dict() as well.")
    if not read.tensors:
        raise InputError(f"{path} must hold tensors by name, got {type(found).__name__} without any.")
    return read


def _sorted_out(found: dict[object, object]) -> Checkpoint:
    """The state dict under its own names, where there is one; else all tensors, but those of an optimiser."""
    read, seen = Checkpoint([value for value in found.values() if isinstance(value, Skipped)]), set[int]()
    state, place = _state_dict(found)
    for name, tensor, of_optimiser in _walk(state, seen):
        read.take(name, tensor, OPTIMISER if of_optimiser else "")
    outside = f"outside {place!r}, the state dict that is analysed; save it in a file of its own to analyse it"
    for name, tensor, of_optimiser in _walk(found, seen):
        read.take(name, tensor, OPTIMISER if of_optimiser else outside)
    return read


def _state_dict(found: dict[object, object]) -> tuple[dict[object, object], str]:
    """The state dict inside a training checkpoint ("model", "state_dict", ...) and its place, else all there is."""
    keys: list[str] = []
    entered = {id(found)}  # a dict that holds itself has no innermost one
    while key := next((k for k in STATE_DICTS if _has_weights(found.get(k)) and id(found[k]) not in entered), None):
        inner = found[key]
        assert isinstance(inner, dict)  # it has weights
        found = inner
        entered.add(id(found))
        keys.append(key)
    return found, ".".join(keys)


def _has_weights(value: object) -> bool:
    return isinstance(value, dict) and any(not of_optimiser for _, _, of_optimiser in _walk(value, set()))


def _walk(found: dict[object, object], seen: set[int]) -> Iterator[tuple[str, Tensor, bool]]:
    """All tensors with their dotted names, and whether an optimiser's state dict holds them.

    A container is entered once, however often and wherever it is held: files may have loops.
    """
    waiting: list[tuple[str, object, bool]] = [("", found, False)]
    while waiting:
        name, value, of_optimiser = waiting.pop()
        if isinstance(value, Tensor):
            yield name, value, of_optimiser
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            of_optimiser |= isinstance(value, dict) and value.keys() >= {"state", "param_groups"}
            inner = [(f"{name}.{key}" if name else str(key), held, of_optimiser) for key, held in items]
            waiting += reversed(inner)


# What a file holds -------------------------------------------------------------------------------


def load(path: Path) -> object:
    """Tensors by name, or nested in dicts and lists; in place of an array that is none the reason."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.name.endswith(".index.json"):
            return _shards(path)
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise _refusal(path, f"it cannot be opened: {error.strerror or type(error).__name__}.") from error
    for magic, words in OTHERS.items():
        if head.startswith(magic):
            raise _refusal(path, words)
    if not head:
        raise _refusal(path, "it is empty (0 bytes). Save it again.")
    if head.startswith(b"PK\x03\x04"):
        return _zip(path)
    if head.startswith(LEGACY[: len(head)]):
        return _torch(path)
    if head.startswith(b"\x93NUMPY"):
        return _arrays(path)
    if head[8:9] == b"{":
        return _safetensors(path)
    if _is_pickle(path):
        raise _refusal(path, PICKLE)
    began = head.startswith(b"\x80")  # as pickles do
    raise _refusal(path, CUT_SHORT if began else f"its format is not one of these: {KINDS}. Save it as safetensors.")


def _refusal(path: Path, why: str) -> InputError:
    return InputError(f"{path} must be a checkpoint of plain tensors, but {why}")


def _zip(path: Path) -> object:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise _refusal(path, CUT_SHORT) from error
    ends = {name.rpartition("/")[2] for name in names}
    if "constants.pkl" in ends:
        return _torchscript(path)
    if "data.pkl" in ends:
        return _torch(path)
    if names and all(name.endswith(".npy") for name in names):
        return _arrays(path)
    if ends & {"model.json", "serialized_exported_program.json"}:
        raise _refusal(path, "it is a program of torch.export. Save model.state_dict() as well, with torch.save.")
    raise _refusal(
        path, f"it is a zip archive of other files ({', '.join(names[:3])}). Unpack it and pass the checkpoint."
    )


def _torch(path: Path) -> object:
    try:
        with warnings.catch_warnings(), path.open("rb") as file:  # of a path torch would look at the name
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # Torch's own message advises weights_only=False, which runs whatever code the file holds: not repeated.
        named = re.search(r"GLOBAL (\S+)", str(error))
        of = f" of {named.group(1)}" if named else ""
        why = (
            f"it holds objects{of}, and reading them would run code (it is read with weights_only=True). "
            "Save model.state_dict() instead of the model, or write safetensors."
        )
        refused = named or re.search(r"Trying to|Can only|Only persistent", str(error))
        raise _refusal(path, why if refused else CUT_SHORT) from error


def _torchscript(path: Path) -> object:
    with zipfile.ZipFile(path) as archive:
        if (bad := archive.testzip()) is not None:
            raise _refusal(path, f"{bad} in it is damaged. Copy or save it again.")
        runs = any(b"__setstate__" in archive.read(name) for name in archive.namelist() if name.endswith(".py"))
    if runs:
        why = (
            "it is a TorchScript archive with a __setstate__, which loading would run. Save model.state_dict() instead."
        )
        raise _refusal(path, why)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(torch.jit.load(str(path), map_location="cpu").state_dict())
    except Exception as error:
        said = str(error).strip().splitlines()
        raise _refusal(path, f"torch.jit.load cannot read it: {said[0] if said else type(error).__name__}.") from error


def _safetensors(path: Path) -> object:
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except Exception as error:
        raise _refusal(
            path, f"safetensors cannot read it ({error}). If it is cut short or damaged, copy or save it again."
        ) from error


def _arrays(path: Path) -> dict[str, object]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"weight": _tensor("weight", found)}
        with found:
            return {name: _array(name, found) for name in found.files}
    except InputError:
        raise
    except Exception as error:
        if "allow_pickle" in str(error):
            raise _refusal(path, "it is an array of Python objects, and reading it would run code.") from error
        raise _refusal(path, CUT_SHORT) from error


def _array(name: str, archive: Any) -> Tensor | Skipped:
    try:
        return _tensor(name, archive[name])
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        return Skipped(name, (), "an array of Python objects: reading it would run code")


def _tensor(name: str, array: np.ndarray) -> Tensor | Skipped:
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    except TypeError:
        return Skipped(name, array.shape, f"an array of dtype {array.dtype.str}, which no tensor has")


def _is_pickle(path: Path) -> bool:
    """Whether a file is a whole pickle, by its opcodes; none of them is carried out."""
    with path.open("rb") as file:
        if b"joblib" in file.read(256):  # its pickles have raw arrays in between
            return True
        file.seek(0)
        try:
            return sum(1 for _ in pickletools.genops(file)) > 1
        except Exception:
            return False


def _folder(path: Path) -> object:
    if (path / ".metadata").exists():
        join = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} model.pt"
        raise _refusal(path, f"it is a checkpoint of torch.distributed. Join it first: {join}")
    if indices := sorted(path.glob("*.index.json"), key=lambda found: (".safetensors." not in found.name, found.name)):
        return _shards(indices[0])
    files = [file for file in sorted(path.iterdir()) if not file.name.startswith(NO_WEIGHTS)]
    for suffixes in IN_FOLDERS:
        held = [file for file in files if file.suffix in suffixes]
        if len(held) == 1:
            return load(held[0])
        if held:
            raise _refusal(path, f"it holds several: {', '.join(file.name for file in held[:8])}. Pass one of them.")
    raise _refusal(path, "it is a folder that holds no checkpoint. Pass a file.")


def _shards(index: Path) -> dict[str, object]:
    """All tensors of the files that an index of Hugging Face names."""
    try:
        names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _refusal(index, "its weight_map cannot be read. Copy or save it again.") from error
    found: dict[str, object] = {}
    for name in names:
        file = index.with_name(Path(name).name)
        if file.name != name or not file.exists():
            raise _refusal(index, f"it names {name!r}, and there is no such file beside it.")
        part = load(file)
        if not isinstance(part, dict):
            raise _refusal(file, f"it holds no tensors by name but a {type(part).__name__}.")
        found.update(part)
    return found
