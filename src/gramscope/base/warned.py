"""Warnings at the user's own line, not at ours."""

import inspect
import math
import os
import warnings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class UndefinedMeasureWarning(UserWarning):
    """A measure is not defined on this data and is given as NaN; the message says why."""


def undefined(what: str, why: str) -> float:
    """NaN, with a warning at the user's line that says why."""
    warnings.warn(f"{what} is not defined: {why}. NaN is returned.", UndefinedMeasureWarning, stacklevel=_users_level())
    return math.nan


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the user's line."""
    warnings.warn(message, category, stacklevel=_users_level())


def _users_level() -> int:
    """The stack level of the first frame outside this package, as seen from the caller of this function."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_back is not None:
        if not os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
            return level
        frame, level = frame.f_back, level + 1
    return level
