"""How much time measuring may take, what can be afforded now, and at the end what it took."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from statistics import median
from typing import Any

from gramscope.base.errors import InputError

GUARANTEED = 13  # measurements that every run has, whatever they cost
WIDEST = 1.9  # and one more whenever the steps are so many times those of the last measurement: 20 in 2,000 steps
FREE = 1.5  # seconds that warm measurements may take in any case, so that a short run has a full page,
SPREAD = 24  # over so many due steps
MARGIN = 0.9  # of the share; the rest is for what cannot be timed from here, such as cold caches
LAST = 3  # measurements that an estimate looks back on


@dataclass
class Budget:
    """``share`` of the time of training that measuring may take (None: any).

    ``costs`` estimates each measure by the median of its last times. The first time of each (``cold``) includes imports
    and warm-up: it estimates nothing. ``used`` is what each group of measures was charged of its part of the time
    (``parts``, which sum to one). ``due`` counts the due steps so far.
    """

    share: Any  # whatever the user gave, checked below
    started: float = field(default_factory=lambda: Budget.clock())
    spent: float = 0.0
    ended: float | None = None
    costs: dict[str, float] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    due: int = 0
    _recent: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = isinstance(self.share, Real) and not isinstance(self.share, bool)
        if self.share is not None and not (number and 0 < float(self.share) < 1):
            raise InputError(f"overhead must be a fraction between 0 and 1, or None for no limit, got {self.share!r}.")

    @staticmethod
    def clock() -> float:
        """Seconds, counted from anywhere."""
        return time.perf_counter()

    @property
    def allowed(self) -> float:
        """Seconds that all warm measurements so far may take; in a short run ``FREE`` ones."""
        return max(FREE * min(self.due / SPREAD, 1.0), self.earned)

    @property
    def earned(self) -> float:
        """The share of the training time, less what else was spent (opening, first times, writing).

        So a long run keeps its share with everything counted.
        """
        if self.share is None:
            return float("inf")
        return MARGIN * self.share * self.training_time - (self.spent - sum(self.used.values()))

    def left(self, group: str, free: bool) -> float:
        """Seconds that a group may use now, with or without the ``FREE`` ones."""
        allowed = self.allowed if free else self.earned
        return float("inf") if self.share is None else self.parts[group] * allowed - self.used.get(group, 0.0)

    def note(self, name: str, seconds: float) -> None:
        """A measure took so long."""
        self.spent += seconds
        self.taken[name] = self.taken.get(name, 0) + 1
        if self.taken[name] == 1:
            self.cold[name] = seconds
            return
        recent = self._recent.setdefault(name, [])
        recent.append(seconds)
        del recent[:-LAST]
        self.costs[name] = median(recent) if len(recent) == LAST else min(recent)

    @contextmanager
    def all_counted(self) -> Iterator[None]:
        """All the time inside counts as spent, also what is not noted by name."""
        begun, before = self.clock(), self.spent
        try:
            yield
        finally:
            self.spent += max(self.clock() - begun - (self.spent - before), 0.0)

    @property
    def training_time(self) -> float:
        """Seconds from the start to the end, or to now, that were not spent here."""
        return (self.clock() if self.ended is None else self.ended) - self.started - self.spent

    def end(self) -> None:
        """Training is over: the clock stands still from now on."""
        self.ended = self.clock()

    @property
    def overhead(self) -> float:
        """Seconds spent measuring for each second of training so far."""
        training = self.training_time
        return self.spent / training if training > 0 else 0.0


def closing_line(
    records: Sequence[Mapping[str, object]], measures: Sequence[str], budget: Budget, left_out: int, unwritten: int = 0
) -> str:
    """
    >>> budget = Budget(0.05, started=0.0, spent=1.0, ended=41.0, taken={"loss": 9, "norm": 9, "step": 2})
    >>> records = [{"step": 0}, {"step": 40}]
    >>> print(closing_line(records, ["loss", "norm", "spectra", "step"], budget, 3))
    gramscope: 2 measurements at steps 0 to 40 (loss, norm 9 times; step 2; spectra 0) took 1.0 s, 2.5 % of training; \
3 due steps were left out to keep overhead=0.05.
    """
    times: dict[int, list[str]] = {}
    for name in measures:
        times.setdefault(budget.taken.get(name, 0), []).append(name)
    counts = [f"{_named(names)} {count}" for count, names in sorted(times.items(), reverse=True)]
    counts[:1] = [f"{first} times" for first in counts[:1]]
    share = 100 * budget.overhead
    cost = f"{budget.spent:.1f} s, {share:.{share < 10:d}f} % of training"
    if share > 1000:
        cost = f"{budget.spent:.1f} s, beside {budget.training_time:.1f} s of training"
    line = (
        f"gramscope: {len(records)} measurements at steps {records[0]['step']} to {records[-1]['step']} "
        f"({'; '.join(counts) or 'nothing to measure'}) took {cost}"
    )
    if unwritten:
        line += f"; {unwritten} of the measurements {'was' if unwritten == 1 else 'were'} not written to the disk"
    if left_out:
        steps = "1 due step was" if left_out == 1 else f"{left_out} due steps were"
        line += f"; {steps} left out to keep overhead={budget.share}"
    if budget.share is not None and share > 100 * budget.share:
        line += f". {_why_more(budget)}"
    return f"{line}."


def _named(measures: Sequence[str], most: int = 4) -> str:
    return ", ".join(measures) if len(measures) <= most else f"{len(measures)} measures"


def _why_more(budget: Budget) -> str:
    """Why a run took more than its share."""
    warm_up = sum(budget.cold.values())
    return (
        f"This is more than overhead={budget.share}, because the run was short ({budget.training_time:.1f} s of "
        f"training): the first {GUARANTEED} measurements, the warm-up of the first ({warm_up:.1f} s) and {FREE:g} s of "
        "measuring are always allowed"
    )
