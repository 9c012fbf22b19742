"""Which measures are read together, and what a turn of them would cost."""

from collections.abc import Sequence

from gramscope.record.budget import Budget
from gramscope.record.moment import Subject
from gramscope.record.readings import READERS

TOGETHER = "together"


class Turns:
    """The measures that share one capture are read together; each dear one takes turns with them.

    Dear is what guesses its cost beforehand, and what turned out to cost more than the others together.
    """

    def __init__(self, names: Sequence[str], budget: Budget) -> None:
        self.names, self.budget = tuple(names), budget
        self.capturing: set[str] = set()

    def split(self, subject: Subject) -> dict[str, tuple[str, ...]]:
        ready = [name for name in self.names if READERS[name].ready(subject)]
        plain = [name for name in ready if READERS[name].guess is None]
        costs = self.budget.costs
        total = costs.get("capture", 0.0) + sum(costs.get(name, 0.0) for name in plain)
        alone = {name for name in plain if self.budget.settled(name) and 2 * costs[name] > total}
        together = tuple(name for name in plain if name not in alone)
        own = {name: (name,) for name in ready if name not in together}
        return ({TOGETHER: together} if together else {}) | own

    def foreseen(self, names: Sequence[str], subject: Subject) -> float | None:
        """Seconds of a turn; None where a cheap measure was never taken."""
        costs = self.budget.costs
        total = costs.get("around", 0.0) + costs.get("commit", 0.0)
        if not self.capturing.isdisjoint(names):
            total += costs.get("capture", 0.0)
        for name in names:
            guess = READERS[name].guess
            if name in costs:
                total += costs[name]
            elif guess is None:
                return None
            else:
                total += guess(subject, costs.get("capture", max(costs.values(), default=0.0)))
        return total
