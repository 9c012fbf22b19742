"""Taking the measures of one due step: in which order, for how long, and what could not be taken."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from gramscope.record.budget import Budget
from gramscope.record.groups import PASS, TOGETHER, DueStep, Groups
from gramscope.record.moment import Moment
from gramscope.record.probe import surroundings
from gramscope.record.readings import READERS, Reading
from gramscope.record.subject import Memory, Subject

R = TypeVar("R")


@dataclass
class Taken:
    """What was measured at a step: numbers and arrays, why others are missing, and which measures must wait."""

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Warnings:
    """How a watch tells of what it could not measure: each time, and once for each subject."""

    each_time: Callable[[str], None]
    once: Callable[[str, str], None]


class Measurer:
    """Takes measures of a subject within a budget. ``stop``: an error of a measure is raised, not noted."""

    def __init__(self, budget: Budget, groups: Groups, memory: Memory, stop: bool, tell: Warnings) -> None:
        self.budget, self.groups, self.memory = budget, groups, memory
        self._stop, self._tell = stop, tell

    def take(self, subject: Subject, due: DueStep, groups: Mapping[str, Sequence[str]]) -> Taken:
        """The cheap measures, and of the others those that can be afforded."""
        taken = Taken()
        with surroundings(subject.model), Moment(subject, due.step, self.memory) as moment:
            # What the shared pass serves comes before what makes passes of its own.
            for group, names in sorted(groups.items(), key=lambda g: any(READERS[n].guess for n in g[1])):
                if group != TOGETHER and not self.groups.affordable(group, names, subject, due):
                    taken.skipped += names
                    continue
                self._take_group(group, names, moment, taken)
        if taken.skipped:
            taken.scalars["skipped"] = float(len(taken.skipped))
        return taken

    def _take_group(self, group: str, names: Sequence[str], moment: Moment, taken: Taken) -> None:
        before = self.budget.spent
        warm = all(self.budget.taken.get(name) for name in names)
        if group == TOGETHER and any(not READERS[n].weights_only and READERS[n].guess is None for n in names):
            self._time(PASS, moment.open)
        for name in names:
            reading = self._time(name, partial(self._read, name, moment, taken.failures))
            taken.scalars |= reading.scalars
            taken.arrays |= reading.arrays
        self.groups.taken(names, moment.step)
        if warm:  # the first time includes warm-up: it is not charged
            self.groups.charge(group, self.budget.spent - before)

    def _time(self, name: str, work: Callable[[], R]) -> R:
        begun = self.budget.clock()
        result = work()
        self.budget.note(name, self.budget.clock() - begun)
        return result

    def _read(self, name: str, moment: Moment, failures: dict[str, str]) -> Reading:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if READERS[name].guess is not None:
                moment.close()  # it makes passes of its own
            try:
                reading = READERS[name].read(moment)
            except Exception as error:
                if self._stop:
                    raise
                failures[name] = f"{type(error).__name__}: {error}"
                reading = Reading()
        undefined = [str(w.message) for w in said if "not defined" in str(w.message)]
        if undefined:
            failures.setdefault(name, "; ".join(dict.fromkeys(undefined)))
        if name in failures and not undefined:
            self._tell.each_time(f"the measure {name!r} failed at step {moment.step}: {failures[name]}")
        for missing, reason in reading.missing.items():
            failures[missing] = reason
            self._tell.once(missing, f"{missing} is left out: {reason}")
        return reading
