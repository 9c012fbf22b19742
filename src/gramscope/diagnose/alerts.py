"""Alerts: what of a run's numbers calls for a look now. Pure functions of the series that a run records."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

Series = tuple[Sequence[int], Sequence[float]]  # steps and values
Values = NDArray[np.float64]

IN_A_ROW = 10  # losses of batches that must all be high: one odd batch is no divergence
RISE = 3.0  # above the best loss, in units of the first loss or of the fall since then, whichever is greater
EXPLOSION = 100.0  # times the greatest gradient norm so far
FEW = 3  # gradient norms before one can be called far too large
DEAD = 0.99  # share of units
# A word of its own; not the change of a loss, nor the scale or weight that it is multiplied with.
_LOSS = re.compile(r"(?:^|[^a-z])loss(?:$|[^a-z](?!change|scale|scaling|weight))", re.IGNORECASE)
_GRADIENT = re.compile(r"(?:^|/)grad(?:ient)?_norm$", re.IGNORECASE)
_ADVICE = {
    "not finite": "Look at the batch and the learning rate of the steps before.",
    "divergence": "Lower the learning rate, warm it up, or clip gradients.",
    "gradient explosion": "Lower the learning rate, or clip gradients.",
    "dead layer": "Nothing flows back through it. Lower the learning rate, or change its initialisation or activation.",
}


@dataclass(frozen=True)
class Alert:
    """A problem reported while a network trains, by a warning or by ``gs.watch(..., on_alert=...)``.

    ``what`` is "divergence", "not finite", "gradient explosion" or "dead layer"; ``where`` is the series. A finding of
    the diagnosis is reported in the same way: ``what`` is its kind, ``where`` the layers, ``value`` its first evidence,
    ``advice`` its sentence and remedy.
    """

    what: str
    where: str
    step: int
    value: float
    threshold: float
    advice: str = ""

    def __str__(self) -> str:
        # The value of a finding is its first evidence's, which is no number of the layer (or setting) that it names.
        plain = self.advice or self.what == "not finite"
        found = "" if plain else f" is {self.value:.3g} (threshold {self.threshold:.3g})"
        return f"{self.what}: {self.where!r}{found} at step {self.step}. {self.advice or _ADVICE[self.what]}"


def is_loss(name: str) -> bool:
    """Whether a logged number is a loss by its name: "loss", "loss_d", "val/loss", but not "loss_scale"."""
    return _LOSS.search(name) is not None


def find_alerts(series: Mapping[str, Series]) -> list[Alert]:
    """All alerts of a run, from its series by name.

    - "not finite": a loss, or a norm of gradients or weights, that is NaN or infinite;
    - "divergence": the last ten losses of batches (on the probe: the last) all lie above ``best + 3 max(first - best,
      |first|)``: far above the first loss and the best;
    - "gradient explosion": a gradient norm of more than a hundred times the greatest before it;
    - "dead layer": a layer with 99 % or more of its units dead.
    """
    found = []
    for name, (steps, given) in series.items():
        values = np.asarray(given, dtype=np.float64)
        for what, look in rules_of(name):
            place, threshold = look(values)
            if place is not None:
                found.append(Alert(what, name, int(steps[place]), float(values[place]), float(threshold)))
    return found


Look = Callable[[Values], tuple[int | None, float]]  # the place of what calls for the alert, and the threshold


@lru_cache(2**16)  # a run has the same names at every measurement, some hundreds of them
def rules_of(name: str) -> tuple[tuple[str, Look], ...]:
    """What is looked for in a series of this name, and how."""
    finite: tuple[str, Look] = ("not finite", lambda values: (_first(~np.isfinite(values)), np.inf))
    if is_loss(name):
        return finite, ("divergence", partial(_high, in_a_row=1 if name.endswith("/probe") else IN_A_ROW))
    if name.startswith(("gradient_norm/", "weight_norm/", "norm/")):
        return (finite,)
    if _GRADIENT.search(name):
        return finite, ("gradient explosion", _exploded)
    return (("dead layer", lambda values: (_first(values >= DEAD), DEAD)),) if name.startswith("dead_units/") else ()


def _high(values: Values, in_a_row: int) -> tuple[int | None, float]:
    finite = values[np.isfinite(values)]
    if len(finite) <= in_a_row or not np.isfinite(values[-1]):
        return None, np.inf
    first, best = finite[0], finite.min()
    scale = max(first - best, abs(first))
    threshold = best + RISE * scale
    high = scale > 0 and finite[-in_a_row:].min() > threshold
    return (len(values) - 1 if high else None), threshold


def _exploded(values: Values) -> tuple[int | None, float]:
    if len(values) <= FEW:
        return None, np.inf
    before = np.maximum.accumulate(np.where(np.isfinite(values), values, 0.0))[:-1]
    place = _first((values[1:] > EXPLOSION * before) & (before > 0) & (np.arange(1, len(values)) >= FEW))
    return (None, np.inf) if place is None else (place + 1, EXPLOSION * before[place])


def _first(where: NDArray[np.bool_]) -> int | None:
    return int(where.argmax()) if where.any() else None
