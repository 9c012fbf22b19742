"""At which optimiser steps to measure."""

import operator
from collections.abc import Callable, Collection
from typing import SupportsIndex

from gramscope.base.errors import InputError

Every = SupportsIndex | str | Collection[int] | Callable[[int], bool]


def due_at(every: object) -> Callable[[int], bool]:
    """A function step -> is it time to measure? Step 0, before any training, always is.

    ``every`` is a number of steps, "log" (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, ...: a factor √2 apart), "log:10" (that
    many a decade), a collection of steps, or a function of the step.

    >>> [step for step in range(60) if due_at("log")(step)]
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45]
    >>> [step for step in range(200) if due_at("log:3")(step)]
    [0, 1, 2, 5, 10, 22, 46, 100]
    """
    if isinstance(every, str):
        return _logarithmic(every)
    if callable(every):
        return lambda step: step == 0 or bool(every(step))
    if isinstance(every, Collection):
        steps = frozenset(_whole(step) for step in every)
        return lambda step: step == 0 or step in steps
    number = _whole(every)
    if number < 1:
        raise InputError(f"every must be a positive number of steps, got {every}.")
    return lambda step: step % number == 0


def _whole(steps: object) -> int:
    """Python's and numpy's whole numbers; 10.0 is left to the user, who may have meant a share of something."""
    try:
        if isinstance(steps, bool) or not isinstance(steps, SupportsIndex):
            raise TypeError
        return operator.index(steps)
    except TypeError:
        raise InputError(
            f'every must be a whole number of steps, "log", "log:10", a collection of whole numbers or a function of '
            f"the step, got {steps!r}. Try every=50."
        ) from None


def _logarithmic(every: str) -> Callable[[int], bool]:
    kind, _, count = every.partition(":")
    if kind != "log" or not (count == "" or (count.isdecimal() and int(count) > 0)):
        raise InputError(f'every must be a number of steps, "log" or "log:10" (that many a decade), got {every!r}.')
    ratio = 2**0.5 if not count else 10 ** (1 / int(count))

    known, place = {0, 1}, 0  # as far as was asked: a loop asks at every step

    def due(step: int) -> bool:
        nonlocal place
        while round(ratio**place) < step:
            place += 1
            known.add(round(ratio**place))
        return step in known

    return due
