"""Results by the name of a layer or of a weight; and the parameters that have none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gramscope.base.results import Result, TableResult, in_short

V = TypeVar("V")


@dataclass(frozen=True, eq=False, repr=False)
class ByLayer(Mapping[str, V], TableResult):
    """A mapping from layers to their results, and a table of them.

    >>> found = ByLayer({"0": 1.5, "1": 2.5})
    >>> found["0"], list(found), found.to_dataframe()["value"].tolist()
    (1.5, ['0', '1'], [1.5, 2.5])
    """

    results: dict[str, V]

    def __getitem__(self, name: str) -> V:
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({in_short(self.results)})"

    def _table(self) -> tuple[list[dict[str, int | float | str]], list[str]]:
        """A row a name: its number, or what its result shows of numbers and short text."""
        rows = [r._shown_values() if isinstance(r, Result) else {"value": r} for r in self.values()]
        plain = [{key: v for key, v in row.items() if isinstance(v, int | float | str)} for row in rows]
        return plain, list(self)


@dataclass(frozen=True, eq=False, repr=False)
class ByWeight(ByLayer[V]):
    """A mapping from weights to their results; ``left_out`` names every other parameter and says why."""

    left_out: dict[str, str]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; {len(self.left_out)} parameters left out)"
