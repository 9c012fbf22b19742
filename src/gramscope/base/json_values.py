"""Values that strict JSON can hold: no NaN, no infinity, no objects."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Json: TypeAlias = object  # None, a bool, an int, a finite float, text, or lists and dicts of these
JSONObject: TypeAlias = dict[str, Any]  # as it was read, or is to be written: entries are checked where they are used
NotFinite = Literal["text", "null"]


def json_values(value: object, not_finite: NotFinite = "text") -> Json:
    """``value`` with only what strict JSON knows; other objects (a path, a dtype) by their text.

    A number that is not finite becomes its name ("NaN", "Infinity"), which a reader can turn back, or null.

    >>> from pathlib import PurePosixPath
    >>> json_values({"lr": float("inf"), 1: (PurePosixPath("a"), None, True)})
    {'lr': 'Infinity', '1': ['a', None, True]}
    >>> json_values([float("nan"), 2.5], not_finite="null")
    [None, 2.5]
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return json_number(value) if not_finite == "text" or math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {clean_text(key): json_values(entry, not_finite) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_values(entry, not_finite) for entry in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return json_values(value.tolist(), not_finite)
    return clean_text(value)


def json_number(value: float) -> float | str:
    """A float as strict JSON has it.

    >>> json_number(0.5), json_number(float("-inf"))
    (0.5, '-Infinity')
    """
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def clean_text(message: object) -> str:
    """Any text in a form that JSON, UTF-8 files and pages can hold."""
    return str(message).encode("utf-8", "replace").decode()
