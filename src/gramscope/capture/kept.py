"""What a forward pass may change besides its result, and putting it back.

Buffers are copied beforehand. Parameters, which may be large, are copied when an operation is about to write into them:
weights that are normalised or clamped in the forward pass. Plain attributes of modules (counters, caches, random
generators) are noted as they are.
"""

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from gramscope.base.nested import tensors_in

# These write running statistics without counting it as a change.
STATISTICS = {"batch_norm", "instance_norm", "native_batch_norm"}
# What these hold is noted; what other objects hold is left to their owner.
COLLECTIONS = (list, dict, set, deque)


class CopyOnWrite(TorchFunctionMode):
    """Keeps the value of every parameter and buffer that an operation writes into, from before the first time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known: dict[int, list[Tensor]] = {}
        self._saved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and not is_lazy(tensor):
                self._known.setdefault(_memory(tensor), []).append(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if writes(func) or name == "__set__":
            self._save(args[:1])
        elif name in STATISTICS and _in_training(name, args, kwargs):
            self._save((args, kwargs))
        elif "out" in kwargs:
            self._save(kwargs["out"])
        return func(*args, **kwargs)

    def _save(self, written: Any) -> None:
        for target in tensors_in(written):
            for tensor in self._known.get(_memory(target), ()):
                if id(tensor) not in self._saved:
                    place = tensor.data  # `tensor.data = other` puts it elsewhere in memory
                    self._saved[id(tensor)] = tensor, place, place.clone()

    def put_back(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, place, value in self._saved.values():
                if not torch.equal(place, value):
                    place.copy_(value)
                if _memory(tensor) != _memory(place):
                    tensor.data = place


@cache
def writes(func: Callable[..., Any]) -> bool:
    """An operation that overwrites its first argument, by its name."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"})
    )


def _in_training(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The flag that all these functions take in the sixth place: statistics are those of the batch, and are noted."""
    flag = kwargs.get("use_input_stats" if name == "instance_norm" else "training")
    if flag is None:
        flag = args[5] if len(args) > 5 else name == "instance_norm"
    return bool(flag)


def _memory(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for those that lie nowhere (inside a transform of torch.func, sparse ones)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def restorer_of_attributes(model: nn.Module) -> Callable[[], None]:
    """Plain attributes of every module as they are now: numbers, tensors, generators, and what collections hold."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    noted = [(vars(module), dict(vars(module)), _contents(module)) for module in modules]

    def restore() -> None:
        for attributes, before, contents in noted:
            for name in set(attributes) - set(before):
                del attributes[name]
            for name, value in before.items():
                if attributes.get(name, attributes) is not value and name not in _OWN:
                    attributes[name] = value
            for put_back in contents:
                put_back()

    return restore


# Registries of nn.Module itself, which have their own ways to be restored.
_OWN = frozenset(vars(nn.Module()))


def _contents(module: nn.Module) -> list[Callable[[], Any]]:
    found: list[Callable[[], Any]] = []
    for name, value in vars(module).items():
        if name in _OWN:
            continue
        if isinstance(value, torch.Generator):
            found.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, Tensor) and not value.is_meta and value.is_leaf:
            found.append(partial(_refill_tensor, value, value.detach().clone()))
        elif isinstance(value, COLLECTIONS):
            found.append(partial(_refill, value, value.copy()))
    return found


def _refill_tensor(tensor: Tensor, value: Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        if tensor.shape == value.shape and not torch.equal(tensor, value):
            tensor.copy_(value)


def _refill(collection: Any, kept: Any) -> None:
    """The same entries again, by identity; a collection that kept them is not written to."""
    entries = [list(c.items()) if isinstance(c, dict) else [(entry,) for entry in c] for c in (collection, kept)]
    if len(collection) == len(kept) and all(
        a is b for one, other in zip(*entries, strict=True) for a, b in zip(one, other, strict=True)
    ):
        return
    collection.clear()
    if isinstance(collection, list | deque):
        collection.extend(kept)
    else:
        collection.update(kept)
