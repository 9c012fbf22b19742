"""Which measures are taken at a due step: the cheap ones together, each expensive one when it can be afforded."""

from collections.abc import Sequence
from typing import NamedTuple

from gramscope.record.budget import LAST, Budget
from gramscope.record.subject import Subject
from gramscope.record.watched_measures import WATCHED_MEASURES

TOGETHER = "together"
PASS = "pass"  # the budget's name for the forward and backward pass that the cheap measures share
CHEAP = 0.03  # seconds: what takes less is never expensive, and is taken at the guaranteed measurements too
# A measure that turned out to be expensive is taken again at so many times the steps, whatever it costs: at 10, 100 and
# 1,000, where many runs end.
RARELY = 10
AT_FIRST = 0.1  # seconds: an expensive measure that should take less is taken twice in every run, and when time is free
COLD = 4  # times as long as a guess for a warm one takes the first time of an expensive measure
CHEAP_PART = 0.6  # of the time for the cheap measures; the expensive ones share the rest


class DueStep(NamedTuple):
    """A step that is due: is it measured whatever it costs, and is it the last of the run?"""

    step: int
    guaranteed: bool
    last: bool = False


class Groups:
    """The measures of a run, and which of them the budget allows.

    Expensive is a measure that estimates its cost beforehand, and one that turned out to take longer than half of the
    shared pass. It is taken beside the cheap ones or not at all, so that all numbers of a measurement are of one step.
    """

    def __init__(self, names: Sequence[str], budget: Budget) -> None:
        self.names, self.budget = tuple(names), budget
        self._last: dict[str, int] = {}  # the step at which each group was taken last

    def split(self, subject: Subject) -> dict[str, tuple[str, ...]]:
        """The cheap ones first. The expensive ones that would fit into their part of the time share it equally."""
        ready = tuple(name for name in self.names if WATCHED_MEASURES[name].ready(subject))
        longest = max(CHEAP, self.budget.costs.get(PASS, 0.0) / 2)
        plain = [name for name in ready if WATCHED_MEASURES[name].guess is None]
        together = tuple(name for name in plain if self._warm(name, subject) <= longest) or ready
        alone = [name for name in ready if name not in together]
        rest = (1 - CHEAP_PART) * self.budget.allowed
        fitting = [name for name in alone if self._estimate(name, (name,), subject) <= rest]
        part = (1 - CHEAP_PART) / max(1, len(fitting))
        self.budget.parts = dict.fromkeys(alone, part) | {TOGETHER: CHEAP_PART if alone else 1.0}
        return ({TOGETHER: together} if together else {}) | {name: (name,) for name in alone}

    def affordable(self, group: str, names: Sequence[str], subject: Subject, due: DueStep) -> bool:
        """May this group be measured now? The cheap one always, where a measurement is guaranteed.

        One that only turned out to be expensive is guaranteed at the last step, so that its series has both its ends,
        and once in ten times the steps.
        """
        if due.guaranteed and group == TOGETHER:
            return True
        turned_out = all(WATCHED_MEASURES[name].guess is None for name in names)
        if group != TOGETHER and turned_out and (due.last or due.step >= RARELY * max(1, self._last.get(group, 0))):
            return True
        seconds = self._estimate(group, names, subject)
        left = self.budget.left(group, free=seconds <= AT_FIRST)
        times = min(self.budget.taken.get(name, 0) for name in names)
        if seconds > AT_FIRST and not turned_out and times == 0:
            seconds *= COLD
        if due.guaranteed:
            left = max(left, AT_FIRST if times < 2 else CHEAP)
        return seconds <= left

    def taken(self, names: Sequence[str], step: int) -> None:
        """These measures were taken at this step."""
        self._last |= dict.fromkeys(names, step)

    def charge(self, group: str, seconds: float) -> None:
        """A group took so long."""
        self.budget.used[group] = self.budget.used.get(group, 0.0) + seconds

    def _estimate(self, group: str, names: Sequence[str], subject: Subject) -> float:
        """Seconds that these measures will take; 0 for cheap ones that were not timed yet."""
        costs = self.budget.costs
        shared = costs.get(PASS, self.budget.cold.get(PASS, 0.0))
        total = costs.get(PASS, 0.0) if group == TOGETHER else 0.0
        for name in names:
            guess = WATCHED_MEASURES[name].guess
            known = [self._warm(name, subject)] if guess is None or name in costs else []
            if guess is not None and self.budget.taken.get(name, 0) <= LAST:  # a disturbed time or two tell little
                known.append(guess(subject, shared))
            total += min(known, default=0.0)
        return total

    def _warm(self, name: str, subject: Subject) -> float:
        """Seconds that a measure takes when it is warm; before it was, those of the passes that it is worth."""
        shared = self.budget.costs.get(PASS, self.budget.cold.get(PASS, 0.0) / COLD)
        return self.budget.costs.get(name, WATCHED_MEASURES[name].passes(subject) * shared)
