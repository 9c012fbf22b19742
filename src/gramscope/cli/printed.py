"""JSON for other programs to read: strict, so that a number that is not finite is null."""

import json

from gramscope.base.json_values import json_values


def json_line(value: object) -> str:
    """One line of JSON that every parser takes.

    >>> json_line({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(json_values(value, not_finite="null"), allow_nan=False)
