"""How much time measuring may take, how much it took, and whose turn it is."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from statistics import median
from typing import Any

from gramscope.base.errors import InputError

MARGIN = 0.6  # the rest is for what cannot be timed from here: cold caches and queues, and calls around the clocks
LAST_MARGIN = 0.7  # at the end, when no training comes after
LAST = 3  # readings that an estimate looks back on


@dataclass
class Budget:
    """``share`` of the time of training that measuring may take (None: any).

    ``costs`` foretells each measure: the median of its last readings, so that neither the first, which also pays for
    imports and warm-up, nor a disturbed one is believed for long. ``used`` is what each turn has taken from
    the time of training, ``uncharged`` what the first measurement took: it includes warm-up, and is not charged.
    """

    share: Any
    started: float = field(default_factory=lambda: Budget.clock())
    spent: float = 0.0
    uncharged: float = 0.0
    ended: float | None = None
    costs: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    margin: float = MARGIN
    _recent: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = isinstance(self.share, Real) and not isinstance(self.share, bool)
        if self.share is not None and not (number and 0 < float(self.share) < 1):
            raise InputError(f"overhead must be a fraction between 0 and 1, or None for no limit, got {self.share!r}.")

    @staticmethod
    def clock() -> float:
        """Seconds, from some moment on."""
        return time.perf_counter()

    @property
    def room(self) -> float:
        """Seconds that may be spent now."""
        if self.share is None:
            return float("inf")
        return self.margin * self.share * self.training_time - (self.spent - self.uncharged)

    def when(self, room: float) -> float:
        """The clock's time at which there will be so much room, if nothing is spent until then."""
        if self.share is None:
            return 0.0
        return self.started + self.spent + (room + self.spent - self.uncharged) / (self.margin * self.share)

    def choose(self, foreseen: Mapping[str, float | None], cold: Collection[str] = ()) -> list[str]:
        """The turns to take now, given what each would cost (None: unknown, so that it is tried).

        Every turn is entitled to the same part of the time there is. It may take more of it only as far as the others
        keep what they are saving up for: a cheap one read at every chance would else leave a dear one waiting for ever.
        Those of ``cold``, whose cost is only known from a cold start, are owed as much as the others together, so that
        they soon show what they really cost.
        """
        room = self.room
        weights = {turn: len(foreseen) if turn in cold else 1 for turn in foreseen}
        unit = (room + sum(self.used.values())) / max(sum(weights.values()), 1)
        left = {turn: weight * unit - self.used.get(turn, 0.0) for turn, weight in weights.items()}
        chosen: list[str] = []
        for turn in sorted(foreseen, key=lambda turn: self.used.get(turn, 0.0)):
            cost = foreseen[turn]
            if cost is None:
                chosen.append(turn)
                continue
            others = [other for other in foreseen if other != turn and other not in chosen]
            owed = sum(min(max(left[other], 0.0), foreseen[other] or 0.0) for other in others)
            if cost <= room and (cost <= left[turn] or cost + owed <= room):
                chosen.append(turn)
                room -= cost
        return chosen

    def settled(self, name: str) -> bool:
        """Was it read more than once, so that its cost is not only that of a cold start?"""
        return len(self._recent.get(name, ())) > 1

    def charge(self, turn: str, seconds: float) -> None:
        self.used[turn] = self.used.get(turn, 0.0) + seconds

    @contextmanager
    def all_counted(self) -> Iterator[None]:
        """All the time inside counts as spent; what was not noted by name is noted as ``around``."""
        begun, before = self.clock(), self.spent
        try:
            yield
        finally:
            rest = self.clock() - begun - (self.spent - before)
            if self.spent > before:  # only what surrounds a reading foretells the surroundings of the next
                self.note("around", max(rest, 0.0))
            else:
                self.spent += max(rest, 0.0)

    def note(self, name: str, seconds: float) -> None:
        self.spent += seconds
        recent = self._recent.setdefault(name, [])
        recent.append(seconds)
        del recent[:-LAST]
        self.costs[name] = median(recent) if len(recent) == LAST else seconds

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
