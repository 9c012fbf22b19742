"""Taking the measures of one due step: in which order, for how long, and what could not be taken."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from gramscope.base.garbage import collection_put_off
from gramscope.record.budget import Budget
from gramscope.record.groups import PASS, TOGETHER, DueStep, Groups
from gramscope.record.measurement import Measurement
from gramscope.record.probe import context
from gramscope.record.subject import Memory, Subject
from gramscope.record.watched_measures import WATCHED_MEASURES, MeasuredValues

R = TypeVar("R")


@dataclass
class Taken:
    """What was measured at a step: numbers and arrays, why others are missing, and which measures must wait."""

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # of these, the measures that raised an error
    skipped: list[str] = field(default_factory=list)


class Measurer:
    """Takes measures of a subject within a budget. ``stop``: an error of a measure is raised, not noted.

    ``warn_once(what, message)`` tells of what could not be measured.
    """

    def __init__(
        self, budget: Budget, groups: Groups, memory: Memory, stop: bool, warn_once: Callable[[str, str], None]
    ) -> None:
        self.budget, self.groups, self.memory = budget, groups, memory
        self._stop, self._warn_once = stop, warn_once

    def take(self, subject: Subject, due: DueStep, groups: Mapping[str, Sequence[str]]) -> Taken:
        """The cheap measures, and of the others those that can be afforded."""
        taken = Taken()
        measured = Measurement(subject, due.step, self.memory)
        with collection_put_off(), context(subject.model), measured as measurement:
            # What the shared pass serves comes before what makes passes of its own.
            for group, names in sorted(groups.items(), key=lambda g: any(WATCHED_MEASURES[n].guess for n in g[1])):
                if group != TOGETHER and not self.groups.affordable(group, names, subject, due):
                    taken.skipped += names
                    continue
                self._take_group(group, names, measurement, taken)
        self._tell_of_failures(taken, due.step)
        if taken.skipped:
            taken.scalars["skipped"] = float(len(taken.skipped))
        return taken

    def _tell_of_failures(self, taken: Taken, step: int) -> None:
        """One warning for one reason: weights that are not finite fail every measure, from then on at every step."""
        for reason in dict.fromkeys(taken.failures[name] for name in taken.failed):
            names = [repr(name) for name in taken.failed if taken.failures[name] == reason]
            self._warn_once(
                reason, f"the measure{'s' * (len(names) > 1)} {', '.join(names)} failed at step {step}: {reason}"
            )

    def _take_group(self, group: str, names: Sequence[str], measurement: Measurement, taken: Taken) -> None:
        before = self.budget.spent
        warm = all(self.budget.taken.get(name) for name in names)
        if group == TOGETHER and any(
            not WATCHED_MEASURES[n].weights_only and WATCHED_MEASURES[n].guess is None for n in names
        ):
            self._time(PASS, measurement.open)
        for name in names:
            measured = self._time(name, partial(self._take, name, measurement, taken))
            taken.scalars |= measured.scalars
            taken.arrays |= measured.arrays
        self.groups.taken(names, measurement.step)
        if warm:  # the first time includes warm-up: it is not charged
            self.groups.charge(group, self.budget.spent - before)

    def _time(self, name: str, work: Callable[[], R]) -> R:
        begun = self.budget.clock()
        result = work()
        self.budget.note(name, self.budget.clock() - begun)
        return result

    def _take(self, name: str, measurement: Measurement, taken: Taken) -> MeasuredValues:
        failures = taken.failures
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            measure = WATCHED_MEASURES[name]
            if measure.guess is not None:
                measurement.close()  # it makes passes of its own
            try:
                if measure.guess is not None and not measure.weights_only and measurement.overflow is not None:
                    raise measurement.overflow
                measured = measure.take(measurement)
            except Exception as error:
                if self._stop:
                    raise
                failures[name] = f"{type(error).__name__}: {error}"
                measured = MeasuredValues()
        undefined = [str(w.message) for w in said if "not defined" in str(w.message)]
        if undefined:
            failures.setdefault(name, "; ".join(dict.fromkeys(undefined)))
        elif name in failures:
            taken.failed.append(name)
        for missing, reason in measured.missing.items():
            failures[missing] = reason
            self._warn_once(missing, f"{missing} is left out: {reason}")
        return measured
