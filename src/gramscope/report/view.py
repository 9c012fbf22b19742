"""What the page needs of a run, read once: series by name, arrays by name and step, and what went wrong."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gramscope.base.errors import GramscopeError
from gramscope.diagnose.history import Series as Series
from gramscope.report.figure import Numbers

Places = NDArray[np.int64]
# Series that do not have the name of the measure which they are of.
MEASURES = {
    "signal": "signals", "saturated_units": "signals", "token_variance": "signals", "class_predicted": "classes",
    "class_recall": "classes", "yes_or_no": "classes", "update_ratio": "update", "update_size": "update",
    "effective_lr": "update", "gradient_given": "update", "gradient_norm": "gradient", "noise_scale": "gradient",
    "gradient_overlap": "given_gradients", "gradient_zeros": "given_gradients", "weight_norm": "weights",
}  # fmt: skip


@dataclass(eq=False)
class RunView:
    """A run as the panels see it. ``taken`` collects the names that panels have shown; the rest is shown as it is."""

    name: str
    index: int
    meta: Mapping[str, object]
    steps: Sequence[int]
    times: Sequence[float]
    series: Mapping[str, Series]
    array_steps: Mapping[str, Sequence[int]]
    load: Callable[[int], Mapping[str, np.ndarray]]
    failures: Sequence[tuple[int, str, str]] = ()
    resumed: Sequence[tuple[int, int]] = ()  # the records before and after each restart, by their steps
    bytes_kept: int = 256 * 2**20
    notes: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    taken_arrays: set[str] = field(default_factory=set)
    _loaded: dict[int, Mapping[str, np.ndarray]] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """The step of the first record."""
        return float(self.steps[0]) if len(self.steps) else 0.0

    @property
    def end(self) -> int:
        """The last step that is known of: of a record, or of a number that was logged."""
        logged = [int(series.steps[-1]) for series in self.series.values() if len(series.steps)]
        return max([*self.steps[-1:], *logged], default=0)

    def get(self, name: str) -> Series | None:
        """The series of this name, marked as shown; None if the run has none."""
        found = self.series.get(name)
        if found is not None:
            self.taken.add(name)
        return found

    def family(self, prefix: str, *, bare: bool = False) -> dict[str, Series]:
        """All series ``prefix/<part>`` by part, in the order of the layers; with ``bare`` also ``prefix`` itself."""
        parts = {name[len(prefix) + 1 :]: name for name in self.series if name.startswith(prefix + "/")}
        found = {part: self._take(parts[part]) for part in in_order(parts, self.layer_order)}
        if bare and prefix in self.series:
            found = {"": self._take(prefix), **found}
        return found

    def _take(self, name: str) -> Series:
        self.taken.add(name)
        return self.series[name]

    @property
    def layer_order(self) -> Sequence[str]:
        """Layers and parameters as the network has them."""
        layers, parameters = self.meta.get("layers"), self.meta.get("parameters")
        named = list(layers) if isinstance(layers, list) else []
        named += list(parameters) if isinstance(parameters, Mapping) else []
        return [name for name in named if isinstance(name, str)]

    def arrays(self, name: str) -> Sequence[int]:
        """The steps that hold an array of this name, marked as shown."""
        if name in self.array_steps:
            self.taken_arrays.add(name)
        return self.array_steps.get(name, ())

    def array_family(self, prefix: str) -> list[str]:
        """The parts of all arrays ``prefix/<part>``, in the order of the layers."""
        parts = [name[len(prefix) + 1 :] for name in self.array_steps if name.startswith(prefix + "/")]
        return in_order(parts, self.layer_order)

    def array(self, name: str, step: int) -> np.ndarray | None:
        """The array of a step as float64; None, with a note, where the file cannot be read."""
        value = self._step(step).get(name)
        return None if value is None else np.asarray(value, dtype=np.float64)

    def _step(self, step: int) -> Mapping[str, np.ndarray]:
        if step not in self._loaded:
            try:
                self._loaded[step] = self.load(step)
            except GramscopeError as error:  # a damaged file costs one frame, not the page; the note names it
                self._loaded[step] = {}
                self.notes.append(f"The arrays of step {step:,} cannot be read: {error}")
            # Panels ask name by name, so files are kept, but not more of them than memory can bear.
            while len(self._loaded) > 1 and self._kept() > self.bytes_kept:
                del self._loaded[next(iter(self._loaded))]
        return self._loaded[step]

    def _kept(self) -> int:
        return sum(array.nbytes for arrays in self._loaded.values() for array in arrays.values())

    @property
    def untaken(self) -> list[str]:
        return [name for name in self.series if name not in self.taken]

    @property
    def untaken_arrays(self) -> list[str]:
        return [name for name in self.array_steps if name not in self.taken_arrays]

    def fact(self, name: str, key: str) -> str:
        """What the measure says of itself (``facts`` of meta.json), found by the name or by what stands before '/'."""
        facts = self.meta.get("facts")
        if not isinstance(facts, Mapping):
            return ""
        prefix = name.partition("/")[0]
        for candidate in (name, prefix, name.replace("/", "."), measure_of(name)):
            entry = facts.get(candidate)
            if isinstance(entry, Mapping) and isinstance(entry.get(key), str):
                return str(entry[key])
        return ""


def measure_of(name: str) -> str:
    """The measure that records a series of this name.

    >>> measure_of("gradient_norm/2"), measure_of("kernel/drift")
    ('gradient', 'kernel')
    """
    prefix = name.partition("/")[0]
    return MEASURES.get(prefix, prefix)


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names in the order of the network; a name below a known one ("3.weight" below "3") follows it, the rest last.

    >>> in_order(["10.weight", "2", "10", "new"], ["2", "10"])
    ['2', '10', '10.weight', 'new']
    """
    place = {name: index for index, name in reversed(list(enumerate(order)))}

    def key(item: tuple[int, str]) -> tuple[int, bool, int]:
        arrival, name = item
        known = name
        while known and known not in place:
            known = known.rpartition(".")[0]
        return place.get(known, len(order)), name != known, arrival

    return [name for _, name in sorted(enumerate(names), key=key)]


def series_by_name(steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> dict[str, Series]:
    """The scalars of all records as one series a name; what is not finite is NaN.

    Records of the same names are taken together: a long run has few kinds of records.
    """
    kinds: dict[tuple[str, ...], tuple[list[int], list[list[float]]]] = {}
    for place, row in enumerate(rows):
        places, values = kinds.setdefault(tuple(row), ([], []))
        places.append(place)
        values.append(list(row.values()))
    found: dict[str, list[tuple[Places, Numbers]]] = {}
    for names, (places, values) in kinds.items():
        block = np.array(values, dtype=np.float64).reshape(len(places), len(names))
        for name, column in zip(names, block.T, strict=True):
            found.setdefault(name, []).append((np.array(places), column))
    all_steps = np.array(steps, dtype=np.float64)
    return {name: _in_order_of_records(parts, all_steps) for name, parts in found.items()}


def _in_order_of_records(parts: Sequence[tuple[Places, Numbers]], steps: Numbers) -> Series:
    places = np.concatenate([place for place, _ in parts])
    values = np.concatenate([column for _, column in parts])
    order = np.argsort(places, kind="stable")
    return Series(steps[places[order]], np.where(np.isfinite(values), values, np.nan)[order])


def joined(recorded: Series, logged: Series) -> Series:
    """A series with what was logged; where both have a step, what was logged counts."""
    alone = ~np.isin(recorded.steps, logged.steps)
    steps = np.concatenate([recorded.steps[alone], logged.steps])
    order = np.argsort(steps, kind="stable")
    return Series(steps[order], np.concatenate([recorded.values[alone], logged.values])[order])
