"""What a run recorded, as the rules see it: series by name, in numpy alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from gramscope import __version__
from gramscope.diagnose.divergence import Numbers as Numbers
from gramscope.diagnose.divergence import speaks_of_finite
from gramscope.store import Run

LOGGED_LOSSES = ("loss", "train_loss", "loss/train", "train/loss", "training_loss")


@dataclass(frozen=True, eq=False)
class Series:
    """A number over the steps: ``steps`` (k,), ``values`` (k,); NaN and infinities stay as they were recorded."""

    steps: Numbers
    values: Numbers

    @cached_property
    def finite(self) -> "Series":
        """The points whose value is finite."""
        keep = np.isfinite(self.values)
        return self if keep.all() else replace(self, steps=self.steps[keep], values=self.values[keep])

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float:
        return float(self.finite.values[0]) if len(self.finite) else float("nan")

    @property
    def last(self) -> float:
        return float(self.finite.values[-1]) if len(self.finite) else float("nan")

    def since(self, step: float) -> "Series":
        keep = self.steps >= step
        return Series(self.steps[keep], self.values[keep])

    def until(self, step: float) -> "Series":
        keep = self.steps <= step
        return Series(self.steps[keep], self.values[keep])

    def median(self) -> float:
        return float(np.median(self.finite.values)) if len(self.finite) else float("nan")


NOTHING = Series(np.empty(0), np.empty(0))


@dataclass(frozen=True, eq=False)
class History:
    """``measured``: numbers of the records; ``logged``: those of the loop. ``layers``: in the order of their use."""

    measured: Mapping[str, Series]
    logged: Mapping[str, Series] = field(default_factory=dict)
    layers: Sequence[str] = ()
    steps: Numbers = field(default_factory=lambda: np.empty(0))
    ruined: Sequence[int] = ()  # steps at which measures refused numbers that were not finite
    sizes: Mapping[str, int] = field(default_factory=dict)  # entries of each layer's parameters
    other_version: str = ""  # of gramscope, where another one recorded the run

    def get(self, name: str) -> Series:
        """The measured series of this name, else an empty one."""
        return self.measured.get(name, NOTHING)

    def has(self, name: str) -> bool:
        return len(self.get(name).finite) > 0

    def value(self, name: str) -> float:
        """The first finite value, for facts that do not change; NaN where it was not recorded."""
        return self.get(name).first

    @cached_property
    def _families(self) -> dict[str, dict[str, Series]]:
        found: dict[str, dict[str, Series]] = {}
        for name, series in self.measured.items():
            prefix, _, part = name.partition("/")
            if part:
                found.setdefault(prefix, {})[part] = series
        return found

    def family(self, prefix: str) -> dict[str, Series]:
        """All series ``prefix/<layer>`` by layer, in the order of the network."""
        found = self._families.get(prefix, {})
        place = {layer: index for index, layer in enumerate(self.layers)}
        return dict(sorted(found.items(), key=lambda item: place.get(item[0], len(place))))

    def medians(self, prefix: str) -> dict[str, float]:
        """The median of each series ``prefix/<layer>`` that has a finite value."""
        return {layer: s.median() for layer, s in self.family(prefix).items() if len(s.finite)}

    def step_of(self, place: int) -> float:
        """The step of this record, or of the last where there are fewer."""
        return float(self.steps[min(place, len(self.steps) - 1)]) if len(self.steps) else 0.0

    @property
    def all_frozen(self) -> bool:
        """Whether no parameter can be trained: then next to nothing is measured."""
        frozen = self.family("frozen")
        return bool(self.sizes) and all(frozen.get(layer, NOTHING).last == 1 for layer in self.sizes)

    @property
    def end(self) -> float:
        return float(max((s.steps[-1] for s in (*self.measured.values(), *self.logged.values()) if len(s)), default=0))

    @cached_property
    def batch_loss(self) -> Series:
        """The loss of the training batches, as the loop logged it."""
        for name in LOGGED_LOSSES:
            if name in self.logged:
                return self.logged[name]
        return NOTHING

    @property
    def probe_loss(self) -> Series:
        return self.get("loss/probe")

    @property
    def loss(self) -> Series:
        """That of the probe, which no choice of a batch disturbs; of the batches where it is not known."""
        return self.probe_loss if self.has("loss/probe") else self.batch_loss

    @property
    def head(self) -> str | None:
        """The last layer whose gradient was measured."""
        return next(reversed(self.family("gradient_norm")), None)

    def until(self, step: float) -> "History":
        """The run as it was known at this step."""

        def cut(found: Mapping[str, Series]) -> dict[str, Series]:
            kept = {name: series.until(step) for name, series in found.items()}
            return {name: series for name, series in kept.items() if len(series)}

        steps = self.steps[self.steps <= step]
        ruined = [refused for refused in self.ruined if refused <= step]
        return replace(self, measured=cut(self.measured), logged=cut(self.logged), steps=steps, ruined=ruined)

    def leaving_out(self, prefixes: tuple[str, ...]) -> "History":
        """The run without the measured series whose names begin so."""
        return replace(self, measured={n: s for n, s in self.measured.items() if not n.startswith(prefixes)})


def history_of_run(run: Run) -> History:
    """From a folder of :func:`gramscope.watch`."""
    rows = [(record.step, record.scalars) for record in run.view]
    logged = {name: Series(n.steps.astype(np.float64), n.values) for name, n in run.logged_numbers().items()}
    ruined = [record.step for record in run.view if any(map(speaks_of_finite, record.failures.values()))]
    return history_of_records(rows, logged, run.meta, ruined)


def history_of_records(
    rows: Sequence[tuple[int, Mapping[str, float]]],
    logged: Mapping[str, Series],
    meta: Mapping[str, object],
    ruined: Sequence[int] = (),
) -> History:
    """From numbers in memory: ``rows`` are (step, scalars); what the loop logged counts once, as logged."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for step, scalars in rows:
        for name, value in scalars.items():
            if name not in logged:
                steps, values = found.setdefault(name, ([], []))
                steps.append(float(step))
                values.append(float(value))
    measured = {name: Series(np.array(steps), np.array(values)) for name, (steps, values) in found.items()}
    all_steps = np.array([float(step) for step, _ in rows])
    version = meta.get("gramscope", __version__)
    other = version if isinstance(version, str) and version != __version__ else ""
    return History(measured, dict(logged), _layers(measured, meta), all_steps, ruined, _sizes(meta), other)


def _layers(measured: Mapping[str, Series], meta: Mapping[str, object]) -> list[str]:
    """In the order of their use, which is that of the signals; before them those that were not seen in use."""
    used, layers = [name.removeprefix("signal/") for name in measured if name.startswith("signal/")], meta.get("layers")
    listed = [layer for layer in layers if isinstance(layer, str)] if isinstance(layers, list) else []
    return [layer for layer in listed if layer not in used] + used


def _sizes(meta: Mapping[str, object]) -> dict[str, int]:
    shapes, found = meta.get("parameters"), dict[str, int]()
    for name, shape in shapes.items() if isinstance(shapes, Mapping) else ():
        layer = str(name).rpartition(".")[0] or str(name)
        if isinstance(shape, list) and all(isinstance(length, int) for length in shape):
            found[layer] = found.get(layer, 0) + int(np.prod(shape, dtype=np.int64))
    return found


def together(*series: Series) -> tuple[Numbers, list[Numbers]]:
    """The steps at which all have a finite value, and the values of each there."""
    steps = reduce(np.intersect1d, [s.finite.steps for s in series])
    return steps, [s.finite.values[np.isin(s.finite.steps, steps)] for s in series]


def first_step(series: Series, holds: Callable[[Numbers], NDArray[np.bool_]]) -> float | None:
    """The first step at which a condition on the values holds."""
    known = series.finite
    places = np.flatnonzero(holds(known.values)) if len(known) else np.empty(0, dtype=np.int64)
    return float(known.steps[places[0]]) if len(places) else None
