"""How much time measuring may take, and how much it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gramscope.base.errors import InputError

MARGIN = 0.5  # the rest is for what cannot be timed from here: cold caches and queues, and the counting of every step


@dataclass
class Budget:
    """``share`` of the time of training that measuring may take (None: any). Costs are what each measure took last."""

    share: float | None
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise InputError(f"overhead must be a fraction between 0 and 1, or None for no limit, got {self.share!r}.")

    def allows(self, name: str, guess: float | None) -> bool:
        """Would this measure keep measuring within its share, at its last cost, or at ``guess`` if it was never taken?

        What was never taken and has no guess is tried.
        """
        cost = self.costs.get(name, guess)
        if self.share is None or cost is None:
            return True
        return self.spent + cost <= MARGIN * self.share * self.training_time

    @contextmanager
    def all_counted(self) -> Iterator[None]:
        """All the time inside counts as spent, not only what is noted by name."""
        begun, before = time.perf_counter(), self.spent
        try:
            yield
        finally:
            self.spent = max(self.spent, before + time.perf_counter() - begun)

    def note(self, name: str, seconds: float) -> None:
        self.spent += seconds
        self.costs[name] = seconds

    @property
    def training_time(self) -> float:
        """Seconds since the start that were not spent here."""
        return time.perf_counter() - self.started - self.spent

    @property
    def overhead(self) -> float:
        """Seconds spent measuring for each second of training so far."""
        training = self.training_time
        return self.spent / training if training > 0 else 0.0
