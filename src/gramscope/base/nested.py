"""Tensors inside nested tuples, lists and dictionaries: the arguments and results of models."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# Checked first: what nearly every argument of an operation is, and what is slow to tell from a Mapping.
_SEQUENCES = (tuple, list)
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
    elif type(value) not in _PLAIN and isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor replaced by ``function(tensor)``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value
