"""Tensors inside nested tuples, lists, mappings and data classes: the arguments and results of models."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

# Checked first: what nearly every argument of an operation is, and what is slow to tell from a Mapping.
_SEQUENCES = (tuple, list, deque)
_PLAIN = frozenset({int, float, bool, str, type(None)})


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in ``value``, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
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


def _fields(value: Any) -> Iterable[str]:
    """Names of the fields of a data class; none for anything else, and for the class itself."""
    return () if isinstance(value, type) else getattr(type(value), "__dataclass_fields__", ())


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor replaced by ``function(tensor)``, in new containers of the same types."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return _tuple_like(value, [map_tensors(function, item) for item in value])
    if isinstance(value, list | deque):
        again = copy.copy(value)
        again.clear()
        again.extend(map_tensors(function, item) for item in value)
        return again
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: map_tensors(function, item) for key, item in value.items()})
    if names := _fields(value):
        again = copy.copy(value)
        for name in names:
            if hasattr(value, name):
                object.__setattr__(again, name, map_tensors(function, getattr(value, name)))  # frozen ones too
        return again
    return value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    try:
        return type(value)(items)
    except TypeError:  # a class whose constructor takes something else
        return tuple.__new__(type(value), items)


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A copy that keeps its class (attributes, order, default) where it can be copied and written, else a dict."""
    try:
        again: Any = copy.copy(value)
        for key, item in items.items():
            again[key] = item
    except TypeError:
        return items
    return again
