"""Checks of the sizes a task or a network is asked for, before anything is drawn."""

from gramscope.base.checks import check_count
from gramscope.base.errors import InputError


def require_positive(**sizes: object) -> None:
    """Raise unless every size is a whole number of at least 1."""
    require_at_least(1, **sizes)


def require_at_least(least: int, **sizes: object) -> None:
    """Raise unless every size is a whole number of at least ``least``."""
    for name, size in sizes.items():
        check_count(size, name, least)


def require_held_out(test: object, count: int) -> None:
    """Raise unless ``test`` of ``count`` examples can be held out with at least one left to train on."""
    if check_count(test, "test", 0) >= count:
        raise InputError(
            f"test must be less than the {count} examples there are, so that some are left to train on, got {test}. "
            "Hold out fewer; 0 keeps all for training."
        )
