"""JSON for other programs to read: strict, so that a number that is not finite is null."""

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any) -> str:
    """One line of JSON that every parser takes.

    >>> strict_json({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(_finite(value), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
