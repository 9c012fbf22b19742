"""When it is worth asking whose turn it is: most steps of a fast loop need neither schedule nor clock."""

from gramscope.record.budget import Budget

QUIET = 31  # steps in a row that are counted without being timed


class Pace:
    """``wake`` is the clock's: before it no turn is taken."""

    def __init__(self, budget: Budget, count: int) -> None:
        self.budget = budget
        self.wake = 0.0
        self._count, self._then = count, budget.clock()

    def counted(self, count: int, seconds: float, each: float) -> None:
        """Step ``count`` took so many seconds, of which ``each`` for what the steps before it, untimed, did as well."""
        self.budget.note("counting", each)
        self.budget.spent += seconds - each + (count - self._count - 1) * self.budget.costs["counting"]

    def quiet_steps(self, count: int) -> int:
        """How many of the next steps would only be refused."""
        now = self.budget.clock()
        steps, seconds = count - self._count, max(now - self._then, 1e-9)
        self._count, self._then = count, now
        # Half of what the last steps foretell, and not many: training may become slower.
        return 0 if now >= self.wake else int(min(QUIET, (self.wake - now) / (2 * seconds) * steps))

    def sleep(self, least: float, read: bool) -> None:
        """Until there is room for the cheapest turn."""
        # Who was refused although there was room will be so until there is clearly more.
        self.wake = self.budget.when(least if read else max(least, self.budget.room + least / 2))
