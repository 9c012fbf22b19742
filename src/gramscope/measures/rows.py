"""Rows kept as they came, in their own dtype, for measures whose exact value needs all pairs of examples."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite
from gramscope.base.errors import InputError
from gramscope.base.moments import Centre, check_paired, examples_first
from gramscope.base.rounding import Rounding

RANGE = 800  # 2^±RANGE, and sums of such numbers, are within float64


def check_size(x: Tensor, what: str, power: int = 4) -> None:
    """Raise unless the largest entry has its ``power`` within float64. No other dtype reaches beyond; zeros may be."""
    largest = float(x.abs().max()) if x.dtype == torch.float64 and x.numel() else 0.0
    limit = RANGE // power
    if largest and abs(math.log2(largest)) > limit:
        raise InputError(
            f"{what} must have a largest entry between 2^-{limit} and 2^{limit}, got {largest:.3g}: powers of it leave "
            "float64. Multiply by one number of the opposite size."
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Chunks of rows of one width; merging puts them side by side and copies nothing.

    >>> rows = Rows.of(torch.zeros(2, 3)).merged(Rows.of(torch.ones(4, 3)))
    >>> rows.n, rows.block(1, 3).tolist()
    (6, [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    """

    chunks: tuple[Tensor, ...] = field(repr=False)
    width: int
    rounding: Rounding = field(default_factory=Rounding)

    @classmethod
    def of(cls, x: Tensor, what: str = "x") -> "Rows":
        """A private copy of ``x`` (n, ...), axes after the first flattened; integers and booleans become float64."""
        x = examples_first(x, what)
        rounding = Rounding.of(x)
        if x.is_floating_point() and x.element_size() == 1:  # float8 has no arithmetic of its own
            x = x.float()
        check_finite(x, what, "Look for overflow (float16, bfloat16) or for a run that has diverged.")
        check_size(x, what)
        rows = x.flatten(1) if x.dim() > 1 else x[:, None]
        kept = rows.clone(memory_format=torch.contiguous_format) if rows.is_floating_point() else rows.double()
        return cls((kept,) if len(kept) else (), kept.shape[1], rounding)

    @cached_property
    def ends(self) -> list[int]:
        """Where each chunk ends, counted in rows."""
        return list(accumulate(chunk.shape[0] for chunk in self.chunks))

    @property
    def n(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def device(self) -> torch.device:
        return self.chunks[0].device if self.chunks else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return sum(chunk.numel() * chunk.element_size() for chunk in self.chunks)

    def merged(self, other: "Rows") -> "Rows":
        if self.width != other.width:
            raise InputError(
                f"rows of one width can be merged, got widths {self.width} and {other.width}. Batches of unequal "
                "spatial size or length need a pooling reduction first."
            )
        rounding = self.rounding.merged(other.rounding)
        if not self.chunks:  # has no device to keep
            return replace(other, rounding=rounding)
        return Rows(self.chunks + tuple(chunk.to(self.device) for chunk in other.chunks), self.width, rounding)

    def block(self, start: int, stop: int) -> Float[Tensor, "rows p"]:
        """Rows ``start`` to ``stop`` in float64."""
        ends = self.ends
        pieces, at = [], bisect_right(ends, start)
        while at < len(ends) and start < min(stop, ends[-1]):
            first = ends[at - 1] if at else 0
            piece = self.chunks[at][start - first : min(stop, ends[at]) - first]
            pieces.append(piece.double())
            start, at = ends[at], at + 1
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.zeros((0, self.width), dtype=torch.float64, device=self.device)

    def all(self) -> Float[Tensor, "n p"]:
        """All rows in float64."""
        return self.block(0, self.n)

    def blocks(self, size: int = 1024) -> Iterator[tuple[slice, Float[Tensor, "rows p"]]]:
        """Some rows after the others in float64, and which they are."""
        for start in range(0, self.n, size):
            some = slice(start, min(start + size, self.n))
            yield some, self.block(some.start, some.stop)

    def centre(self) -> Centre:
        """Mean over the rows, to twice the digits of float64, without a float64 copy of them all."""
        mean, rest = torch.zeros((2, self.width), dtype=torch.float64, device=self.device)
        for _, block in self.blocks():
            mean += block.sum(0) / self.n
        for _, block in self.blocks():  # about the mean, whose last digits are rounding
            rest += (block - mean).sum(0) / self.n
        return Centre(mean, torch.zeros_like(mean)).moved(rest)


@dataclass(frozen=True, eq=False)
class PairedRows:
    """Rows of several kinds (features, labels, ...) for the same examples; what is None is left out.

    >>> state = PairedRows.of(a=torch.zeros(2, 3), b=None).merged(PairedRows.of(a=torch.ones(1, 3)))
    >>> state.n, list(state.kinds)
    (3, ['a'])
    """

    kinds: Mapping[str, Rows]

    @classmethod
    def of(cls, **tensors: Tensor | None) -> "PairedRows":
        given = {kind: x for kind, x in tensors.items() if x is not None}
        rows = {kind: Rows.of(x, kind) for kind, x in given.items()}
        first = next(iter(given))
        for kind, x in given.items():
            check_paired(given[first], x, first, kind)
        return cls(rows)

    @property
    def n(self) -> int:
        return next(iter(self.kinds.values())).n if self.kinds else 0

    def merged(self, other: "PairedRows") -> "PairedRows":
        if self.kinds.keys() != other.kinds.keys():
            raise InputError(
                "every batch must have the same entries, got "
                f"{' and '.join(self.kinds)}, then {' and '.join(other.kinds)}."
            )
        return PairedRows({kind: rows.merged(other.kinds[kind]) for kind, rows in self.kinds.items()})
