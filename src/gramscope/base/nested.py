"""Tensors inside nested tuples, lists, mappings and data classes: the arguments and results of models."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TypeAlias, TypeVar, cast

from torch import Tensor

# What a model is called with: a tensor, or tensors inside tuples, lists, mappings and data classes.
ModelInput: TypeAlias = object
T = TypeVar("T")

# Checked first: what nearly every argument of an operation is, and what is slow to tell from a Mapping.
_SEQUENCES = (tuple, list, deque)
_PLAIN = frozenset({int, float, bool, str, type(None)})


def tensors_in(value: object) -> list[Tensor]:
    """All tensors in ``value``, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            _collect(item, found)
    elif type(value) in _PLAIN:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    else:
        for name in _fields(value):
            _collect(getattr(value, name, None), found)


def _fields(value: object) -> Iterable[str]:
    """Names of the fields of a data class; none for anything else, and for the class itself."""
    return () if isinstance(value, type) else getattr(type(value), "__dataclass_fields__", ())


def map_tensors(function: Callable[[Tensor], object], value: T) -> T:
    """``value`` with every tensor replaced by ``function(tensor)``, in new containers of the same types."""
    return cast(T, _mapped(function, value))


def _mapped(function: Callable[[Tensor], object], value: object) -> object:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return _tuple_like(value, [_mapped(function, item) for item in value])
    if isinstance(value, list | deque):
        again = copy.copy(value)
        again.clear()
        again.extend(_mapped(function, item) for item in value)
        return again
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: _mapped(function, item) for key, item in value.items()})
    if names := _fields(value):
        twin = copy.copy(value)
        for name in names:
            if hasattr(value, name):
                object.__setattr__(twin, name, _mapped(function, getattr(value, name)))  # frozen ones too
        return twin
    return value


def _tuple_like(value: tuple[object, ...], items: list[object]) -> tuple[object, ...]:
    if hasattr(value, "_fields"):
        return type(value)(*items)  # type: ignore[arg-type]  # a named tuple takes its fields one by one
    try:
        return type(value)(items)
    except TypeError:  # a class whose constructor takes something else
        return tuple.__new__(type(value), items)


def _mapping_like(value: Mapping[object, object], items: dict[object, object]) -> Mapping[object, object]:
    """A copy that keeps its class (attributes, order, default) where it can be copied and written, else a dict."""
    try:
        again = cast(MutableMapping[object, object], copy.copy(value))
        for key, item in items.items():
            again[key] = item
    except TypeError:
        return items
    return again
