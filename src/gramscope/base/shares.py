"""Shares of a whole: what each parameter, layer or part has of the sum."""

import math
from collections.abc import Mapping

from gramscope.base.user_warnings import undefined


def shares(parts: Mapping[str, float], why: str = "the parts sum to zero") -> dict[str, float]:
    """``part / Σ parts``, by name; they sum to 1, and a part of the other sign has a negative share.

    NaN for all, with a warning that says ``why``, where the sum is zero.

    >>> shares({"a": 1.0, "b": 3.0})
    {'a': 0.25, 'b': 0.75}
    """
    total = math.fsum(parts.values())
    if total == 0:
        return dict.fromkeys(parts, undefined("a share of the parts", why))
    return {name: part / total for name, part in parts.items()}
