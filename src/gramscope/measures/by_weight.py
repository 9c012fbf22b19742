"""Results by the name of a weight, and the parameters that have none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TypeVar

from gramscope.base.results import TableResult, in_short

V = TypeVar("V")


@dataclass(frozen=True, eq=False, repr=False)
class ByWeight(Mapping[str, V], TableResult):
    """A mapping from weights to their results; ``left_out`` names every other parameter and says why.

    >>> found = ByWeight({"0.weight": 1.5}, left_out={"0.bias": "no matrix"})
    >>> found["0.weight"], list(found), len(found)
    (1.5, ['0.weight'], 1)
    """

    results: dict[str, V]
    left_out: dict[str, str]

    def __getitem__(self, name: str) -> V:
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({in_short(self.results)}; {len(self.left_out)} parameters left out)"

    def _table(self) -> tuple[list[dict[str, int | float | str]], list[str]]:
        """A row a weight: its number, or the fields of its result that are numbers or short text."""
        rows = [vars(result) if is_dataclass(result) else {"value": result} for result in self.values()]
        plain = [{key: v for key, v in row.items() if isinstance(v, int | float | str)} for row in rows]
        return plain, list(self)
