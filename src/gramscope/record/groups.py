"""Which measures are taken at a due step: the cheap ones together, each expensive one when it can be afforded."""

from collections.abc import Sequence

from gramscope.record.budget import LAST, Budget
from gramscope.record.moment import Subject
from gramscope.record.readings import READERS

TOGETHER = "together"
PASS = "pass"  # the budget's name for the forward and backward pass that the cheap measures share
CHEAP = 0.1  # seconds: what takes less is taken at the guaranteed measurements too
AT_FIRST = 1.0  # seconds: what should take less is tried once


class Groups:
    """The measures of a run, and which of them the budget allows.

    Expensive is a measure that estimates its cost beforehand, and one that turned out to take more than all others
    together. It is taken beside the cheap ones or not at all, so that all numbers of a measurement are of one step.
    """

    def __init__(self, names: Sequence[str], budget: Budget) -> None:
        self.names, self.budget = tuple(names), budget

    def split(self, subject: Subject) -> dict[str, tuple[str, ...]]:
        """The cheap ones first. They have half of the time, and the expensive ones equal parts of the other half."""
        ready = tuple(name for name in self.names if READERS[name].ready(subject))
        plain = [name for name in ready if READERS[name].guess is None]
        costs = self.budget.costs
        half = (costs.get(PASS, 0.0) + sum(costs.get(name, 0.0) for name in plain)) / 2
        together = tuple(name for name in plain if costs.get(name, 0.0) <= max(CHEAP, half)) or ready
        alone = [name for name in ready if name not in together]
        self.budget.parts = {name: 0.5 / len(alone) for name in alone} | {TOGETHER: 0.5 if alone else 1.0}
        return ({TOGETHER: together} if together else {}) | {name: (name,) for name in alone}

    def affordable(self, group: str, names: Sequence[str], subject: Subject, guaranteed: bool) -> bool:
        """May this group be measured now? The cheap one always, where a measurement is guaranteed."""
        seconds, room = self._estimate(group, names, subject), self.budget.room(group)
        if guaranteed and group == TOGETHER:
            return True
        if guaranteed:
            first = not any(self.budget.taken.get(name) for name in names)
            room = max(room, AT_FIRST if first else CHEAP)
        return seconds <= room

    def charge(self, group: str, seconds: float, guaranteed: bool) -> None:
        """A group took so long; what is guaranteed anyway uses up nothing."""
        if not guaranteed or (group != TOGETHER and seconds > CHEAP):
            self.budget.used[group] = self.budget.used.get(group, 0.0) + seconds

    def _estimate(self, group: str, names: Sequence[str], subject: Subject) -> float:
        """Seconds that these measures will take; 0 for cheap ones that were not timed yet."""
        costs = self.budget.costs
        shared = costs.get(PASS, self.budget.cold.get(PASS, 0.0))
        total = costs.get(PASS, 0.0) if group == TOGETHER else 0.0
        for name in names:
            guess = READERS[name].guess
            known = [costs[name]] if name in costs else []
            if guess is not None and self.budget.taken.get(name, 0) <= LAST:  # a disturbed time or two tell little
                known.append(guess(subject, shared))
            total += min(known, default=0.0)
        return total
