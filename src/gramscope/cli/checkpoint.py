"""The tensors of a checkpoint file: those of its state dict, and all others with the reason why they are left out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.cli.checkpoint_files import load
from gramscope.spectra.weights import Skipped

STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")  # what trainers call it, the first one first
OPTIMISER = "the state of an optimiser, no weight of the network"


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
