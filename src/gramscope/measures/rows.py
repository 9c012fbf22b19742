"""Rows kept as they came, in their own dtype, for measures whose exact value needs all pairs of examples."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite, check_plain
from gramscope.base.errors import InputError
from gramscope.base.moments import Centre
from gramscope.base.rounding import Rounding

ORDINARY = 200  # numbers within 2^±200 have fourth powers, and sums of them, within float64
NOTHING = -(2**20)  # the exponent of zeros, below that of any number


def size_exponent(x: Tensor) -> int:
    """e such that ``x / 2^e`` is of ordinary size: 0 for x that is, and ``NOTHING`` for zeros alone."""
    if x.dtype != torch.float64 or x.numel() == 0:  # no other dtype reaches beyond
        return 0
    largest = float(x.abs().max())
    exponent = math.frexp(largest)[1]
    if abs(exponent) <= ORDINARY:
        return 0 if largest else NOTHING
    return max(exponent, -1000)  # 2^1000 is a number, 2^1074 is not


def of_ordinary_size(x: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], int]:
    """``x / 2^e``, which costs no digits, and e; most often x itself and 0."""
    exponent = size_exponent(x)
    return (x, 0) if exponent in (0, NOTHING) else (x * 2.0**-exponent, exponent)


def frobenius(x: Float[Tensor, "..."]) -> float:
    """``|x|``, also where the squares of x leave float64; infinite where the norm itself does."""
    ordinary, exponent = of_ordinary_size(x)
    return times_power(float(ordinary.square().sum().sqrt()), exponent)


def times_power(value: float, power: int) -> float:
    """``value · 2^power``, infinite where float64 ends."""
    try:
        return math.ldexp(value, power)
    except OverflowError:
        return math.copysign(math.inf, value)


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
        if not isinstance(x, Tensor):
            raise InputError(f"{what} must be a torch.Tensor, got {type(x).__name__}. Use torch.as_tensor(...).")
        check_plain(x, what)
        if x.dim() == 0:
            raise InputError(f"{what} must have examples on its first axis, got a single number. Add a batch axis.")
        x, rounding = x.detach(), Rounding.of(x)
        if x.device.type == "mps":  # the one common device that knows no float64
            x = x.cpu()
        if x.is_floating_point() and x.element_size() == 1:  # float8 has no arithmetic of its own
            x = x.float()
        check_finite(x, what, "Look for overflow (float16, bfloat16) or for a run that has diverged.")
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

    def scaled(self, power: int) -> "Rows":
        """The rows times ``2^power``, which costs no digits."""
        return self if power == 0 else replace(self, chunks=tuple(c.double() * 2.0**power for c in self.chunks))

    @property
    def exponent(self) -> int:
        return max((size_exponent(chunk) for chunk in self.chunks), default=NOTHING)

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

    def centre(self, size: int = 1024) -> Centre:
        """Mean over the rows, to twice the digits of float64, without a float64 copy of them all."""
        zero = torch.zeros(self.width, dtype=torch.float64, device=self.device)
        centre = Centre(zero, zero)
        for _ in range(2):  # the second time about the first's mean, whose last digits are rounding
            total = torch.zeros_like(zero)
            for start in range(0, self.n, size):
                total += (self.block(start, start + size) - centre.mean).sum(0)
            centre = centre.moved(total / max(self.n, 1))
        return centre
