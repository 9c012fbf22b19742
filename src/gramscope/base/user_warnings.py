"""Warnings at the user's own line, not at ours."""

import math
import sys
import warnings
from types import FrameType

# Frames between the user's line and a warning: ours, and those of whoever calls our hooks.
_BETWEEN = {
    "gramscope",
    "torch",
    "contextlib",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "jaxtyping",
    "typer",
    "click",
}


class UndefinedMeasureWarning(UserWarning):
    """A measure is not defined on this data and is given as NaN; the message says why.

    >>> import warnings, torch, gramscope as gs
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     value = gs.measures.participation_ratio(torch.zeros(3))
    >>> value, told[0].category.__name__
    (nan, 'UndefinedMeasureWarning')
    """


class RandomOutputsWarning(UserWarning):
    """The model draws random numbers: what is measured belongs to one draw."""


class SlowPathWarning(UserWarning):
    """The result is exact, but a part of it took a slow way; the message says which part and why."""


def warn_of_random_outputs() -> None:
    warn(
        "the model draws random numbers in its forward pass (dropout in training mode?). What is measured belongs to "
        "one draw of them; call model.eval() for the network that is used after training.",
        RandomOutputsWarning,
    )


def undefined(what: str, why: str) -> float:
    """NaN, with a warning that says why."""
    warn(f"{what} is not defined: {why}. NaN is returned.", UndefinedMeasureWarning)
    return math.nan


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the user's own line, however deep inside it arose."""
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and _between(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _between(frame: FrameType) -> bool:
    # The checking wrappers of the tests have no module of their own, but a file name in angle brackets.
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module in _BETWEEN or frame.f_code.co_filename.startswith("<@beartype")
