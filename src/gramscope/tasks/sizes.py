"""Checks of the sizes a task or a network is asked for, before anything is drawn."""

from typing import Any

from gramscope.base.errors import InputError


def require_positive(**sizes: Any) -> None:
    """Raise unless every size is a whole number of at least 1."""
    require_at_least(1, **sizes)


def require_at_least(least: int, **sizes: Any) -> None:
    """Raise unless every size is a whole number of at least ``least``."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < least:  # numpy's integers pass too
            raise InputError(f"{name} must be a whole number of at least {least}, got {size!r}. Pass e.g. {least}.")


def require_held_out(test: Any, count: int) -> None:
    """Raise unless ``test`` of ``count`` examples can be held out with at least one left to train on."""
    require_at_least(0, test=test)
    if test >= count:
        raise InputError(
            f"test must be less than the {count} examples there are, so that some are left to train on, got {test}. "
            "Hold out fewer; 0 keeps all for training."
        )
