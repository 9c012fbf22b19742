"""Axes of hand-written drawings: where a number lies on the paper, and which numbers get a label."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gramscope.report.figure import Axis, Numbers

MOST = 1e308  # the largest numbers that an axis shows
LEAST = 1e-300  # the smallest span that can be cut into steps: below lie numbers that have lost their digits


@dataclass(frozen=True)
class Scale:
    """A map from numbers in [low, high] to the paper from ``start`` to ``end``."""

    low: float
    high: float
    log: bool
    start: int | float
    end: int | float

    @classmethod
    def of(cls, values: Sequence[Numbers], axis: Axis, start: int | float, end: int | float) -> "Scale":
        """The scale that shows all finite values (all positive ones on a logarithmic axis), or the axis's own range."""
        together = np.concatenate([np.ravel(v) for v in values]) if len(values) else np.zeros(0)
        usable = together[np.isfinite(together) & ((together > 0) | (not axis.log))]
        if axis.range is not None:
            low, high = axis.range
        elif not len(usable):
            low, high = (1.0, 10.0) if axis.log else (0.0, 1.0)
        else:
            low, high = float(usable.min()), float(usable.max())
            if axis.log:
                low, high = (low, high) if high > low else (low / 2, min(high * 2, MOST))
            else:
                air = 0.04 * high - 0.04 * low or 0.5 * abs(high) or 0.5
                low, high = max(low - air, -MOST), min(high + air, MOST)
        return cls(low, high, axis.log, start, end)

    def place(self, values: Numbers) -> Numbers:
        """Places on the paper; NaN for what the axis cannot show.

        >>> Scale(1.0, 100.0, True, 0.0, 10.0).place(np.array([1.0, 10.0, 0.0])).tolist()
        [0.0, 5.0, nan]
        """
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.log10(np.where(values > 0, values, np.nan)) if self.log else np.asarray(values, dtype=np.float64)
        # Halved, so that numbers near the largest float do not overflow.
        return self.start + (x / 2 - low / 2) / (high / 2 - low / 2) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers within [low, high], about so many.

    >>> ticks(0.0, 1.0), ticks(-3.0, 412.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 100.0, 200.0, 300.0, 400.0])
    """
    if not high - low > LEAST or not math.isfinite(high - low):
        return [low]
    rough = (high - low) / max(1, about - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.7)
    first = math.ceil(low / step - 1e-9)
    return [
        round(place * step, 12 - math.floor(math.log10(step)))
        for place in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; where there are fewer than two, also 2 and 5 times them.

    >>> log_ticks(0.5, 200.0), log_ticks(1.5, 8.0)
    ([1.0, 10.0, 100.0], [2.0, 5.0])
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first) / 7))
    whole = [10.0**power for power in range(first, last + 1, every)]
    if len(whole) >= 2:
        return whole
    fine = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [value for value in fine if low * 0.999 <= value <= high * 1.001]
