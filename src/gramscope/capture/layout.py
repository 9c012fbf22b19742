"""Which row of a site belongs to which example.

A network may fold, split and move its example axis on the way: (n, T, d), (T, n, d), (n·T, d),
windows, packed sequences, routed tokens. The signals themselves tell. A backward pass whose
cotangent is scaled by ``a_mu`` for example mu gives ``A = a_{label(row)} B`` on every row, where B is
the unscaled pass, if and only if each row serves one example. So the layout is read off and the
independence of the examples is proved in one comparison, at the price of one extra backward pass.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# ‖A - aB‖ / ‖aB‖ allowed for the right layout. Both sides carry the rounding of one backward pass; a wrong layout or a
# coupling of the examples gives an error of the coupling's own size. Float64 networks may round to float32 inside, as
# Hugging Face's norms do.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}
TF32_TOLERANCE = 2e-2  # TF32 rounds each factor to 10 bits


@dataclass(frozen=True)
class Regular:
    """Rows are (outer, example, inner) in row-major order."""

    n: int
    outer: int
    inner: int

    @property
    def positions(self) -> int:
        return self.outer * self.inner

    def gather(self, rows: Tensor, axis: int) -> Tensor:
        """(..., M, ...) -> (..., n, T, ...): examples first, then the positions of each."""
        split = rows.unflatten(axis, (self.outer, self.n, self.inner)).transpose(axis, axis + 1)
        return split.flatten(axis + 1, axis + 2)


@dataclass(frozen=True)
class Ragged:
    """Rows in any order, any number for each example; examples are padded to the longest with zeros."""

    n: int
    labels: Int[Tensor, " rows"]

    @property
    def positions(self) -> int:
        return max(1, int(torch.bincount(self.labels, minlength=self.n).max())) if len(self.labels) else 1

    def gather(self, rows: Tensor, axis: int) -> Tensor:
        order = torch.argsort(self.labels, stable=True)
        counts = torch.bincount(self.labels, minlength=self.n)
        starts = counts.cumsum(0) - counts
        within = torch.arange(len(order), device=rows.device) - starts[self.labels[order]]
        shape = (*rows.shape[:axis], self.n * self.positions, *rows.shape[axis + 1 :])
        slots = self.labels[order] * self.positions + within
        padded = rows.new_zeros(shape).index_copy_(axis, slots, rows.index_select(axis, order))
        return padded.unflatten(axis, (self.n, self.positions))


Layout = Regular | Ragged


def example_weights(n: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " n"]:
    """Distinct positive numbers ``a_mu``, geometric from 1/16 to 16 in a fixed shuffled order."""
    generator = torch.Generator().manual_seed(n)
    exponents = torch.linspace(-4, 4, n, dtype=torch.float64, device="cpu")[
        torch.randperm(n, generator=generator, device="cpu")
    ]
    return (2.0**exponents).to(dtype=dtype, device=device)


def power_of_two_weights(n: int, dtype: torch.dtype, device: torch.device, seed: int) -> Float[Tensor, " n"]:
    """Powers of two in a shuffled order, all different where there is room for n of them.

    Scaling by these changes no rounding, so that signals scale exactly even where they are rounding and nothing else.
    """
    reach = min(60, int(math.log2(torch.finfo(dtype).max)) // 6)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.linspace(-reach, reach, n, dtype=torch.float64, device="cpu")[
        torch.randperm(n, generator=generator, device="cpu")
    ]
    return (2.0 ** exponents.round()).to(dtype=dtype, device=device)


def exact_layout(
    plain: Float[Tensor, "rows features"],
    scaled: Sequence[tuple[Float[Tensor, " n"], Float[Tensor, "rows features"]]],
) -> Regular | None:
    """The layout under which every ``scaled = a · plain`` to the last digit, or None."""
    n = len(scaled[0][0])
    for outer in _divisors(len(plain) // n) if len(plain) % n == 0 else ():
        inner = len(plain) // n // outer
        if all(torch.equal(a.repeat_interleave(inner).repeat(outer)[:, None] * plain, found) for a, found in scaled):
            return Regular(n, outer, inner)
    return None


def find_layout(
    scaled: Float[Tensor, "rows features"],
    plain: Float[Tensor, "rows features"],
    weights: Float[Tensor, " n"],
    tolerance: float,
) -> Layout | None:
    """The layout under which ``scaled = a · plain``, or None where the examples are coupled."""
    n, rows = len(weights), len(plain)
    examples = torch.arange(n, device=plain.device)
    if rows % n == 0:
        for outer in _divisors(rows // n):
            inner = rows // n // outer
            if _agree(scaled, plain, weights, examples.repeat_interleave(inner).repeat(outer), tolerance):
                return Regular(n, outer, inner)
    labels = _nearest_label(scaled, plain, weights)
    return Ragged(n, labels) if _agree(scaled, plain, weights, labels, tolerance) else None


def _agree(
    scaled: Float[Tensor, "rows features"],
    plain: Float[Tensor, "rows features"],
    weights: Float[Tensor, " n"],
    labels: Int[Tensor, " rows"],
    tolerance: float,
) -> bool:
    """``scaled = a · plain`` for every example by itself, so that a large one hides nothing in the others."""
    gap = torch.addcmul(scaled, weights[labels][:, None], plain, value=-1)
    norms = torch.stack([torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (gap, scaled)]).square()
    by_example = norms.new_zeros(2, len(weights)).index_add_(1, labels, norms)
    return bool((by_example[0] <= tolerance**2 * by_example[1]).all())


def _divisors(positions: int) -> Iterator[int]:
    """Examples-major first, examples-minor second, then everything between."""
    yield 1
    if positions > 1:
        yield positions
    for divisor in range(2, math.isqrt(positions) + 1):
        if positions % divisor == 0:
            yield divisor
            if divisor * divisor != positions:
                yield positions // divisor


def _nearest_label(
    scaled: Float[Tensor, "rows features"],
    plain: Float[Tensor, "rows features"],
    weights: Float[Tensor, " n"],
) -> Int[Tensor, " rows"]:
    ratio = (scaled * plain).sum(1) / (plain * plain).sum(1).clamp_min(torch.finfo(plain.dtype).tiny)
    order = torch.argsort(weights)
    # Midpoints in the logarithm, because the weights are geometric.
    edges = (weights[order][1:] * weights[order][:-1]).sqrt()
    return order[torch.bucketize(ratio.clamp_min(0).contiguous(), edges)]
