"""Results by the name of a weight, and the parameters that have none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class ByWeight(Mapping[str, V]):
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
