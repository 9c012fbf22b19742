"""When it is worth asking whose turn it is: most steps of a fast loop need neither schedule nor clock."""

from gramscope.record.budget import Budget

QUIET = 31  # steps in a row that are counted without being timed
LONGEST, LINES = 1.0, 20  # records without measures: so many seconds apart, and closer at the start


class Pace:
    """``wake`` and ``next_line`` are the clock's: before them no turn, and no line of logged numbers, is taken."""

    def __init__(self, budget: Budget, count: int) -> None:
        self.budget = budget
        self.wake = self.next_line = 0.0
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

    def line_is_due(self) -> bool:
        return self.budget.share is None or self.budget.clock() >= self.next_line

    def line_was_tried(self) -> None:
        """The next comes later: dense enough for a curve, however fast the loop is."""
        now = self.budget.clock()
        self.next_line = now + min(LONGEST, (now - self.budget.started) / LINES)

    def sleep(self, least: float, read: bool, lines: bool) -> None:
        """Until there is room for the cheapest turn, or for a line where the loop logs."""
        # Who was refused although there was room will be so until there is clearly more.
        self.wake = self.budget.when(least if read else max(least, self.budget.room + least / 2))
        if lines:
            self.wake = min(self.wake, max(self.next_line, self.budget.when(0.0)))
