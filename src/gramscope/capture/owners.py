"""Which example each entry of a signal belongs to.

A network may fold, split and move its example axis on the way: (n, T, d), (T, n, d), (n·T, d), windows, packed
sequences, routed tokens. The signals themselves tell. Scaling the cotangent of example μ by ``2^{e_μ}`` scales every
signal that serves μ alone by exactly that, since powers of two change no rounding; a signal that serves several
examples scales by no power of two. So the layout is read off, and that the examples do not mix is proved, at the price
of one extra backward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Where operations add in an order of their own at each call (fused attention, scatter on a GPU), exponents hold only to
# rounding: ‖scaled - 2^e plain‖ / ‖scaled‖ allowed for each example. In float32 that is the error of such sums; a
# coupling of the examples weaker than this changes a kernel by no more.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# One entry that serves several examples agrees by chance as often as that; so many that do not vanish never do.
FEWEST = {torch.float64: 1, torch.float32: 4, torch.float16: 8, torch.bfloat16: 12}
# Exponents are taken from -REACH to REACH - 1: signals may be small, and must not vanish.
REACH = {torch.float64: 32, torch.float32: 16, torch.bfloat16: 16, torch.float16: 4}


@dataclass(frozen=True)
class Owner:
    """The examples of a signal's entries: by position along one axis, or, if ``axis`` is None, entry by entry.

    ``regular`` is (outer, inner) where the positions are (outer, example, inner) in row-major order; for other layouts
    ``found`` are the numbers of the examples, -1 where the signal is zero.
    """

    n: int
    axis: int | None
    device: torch.device
    regular: tuple[int, int] | None = None
    found: Int[Tensor, "..."] | None = None

    @cached_property
    def labels(self) -> Int[Tensor, "..."]:
        """The number of the example of each position, or of each entry."""
        if self.found is not None:
            return self.found
        assert self.regular is not None
        outer, inner = self.regular
        return torch.arange(self.n, device=self.device).repeat_interleave(inner).repeat(outer)

    @cached_property
    def places(self) -> tuple[Int[Tensor, " positions"], Int[Tensor, " positions"], int]:
        """The positions along the axis that belong to an example, their slots among (n, T), and T."""
        kept = (self.labels >= 0).nonzero()[:, 0]
        labels = self.labels[kept]
        order = torch.argsort(labels, stable=True)
        kept, labels = kept[order], labels[order]
        counts = torch.bincount(labels, minlength=self.n)
        within = torch.arange(len(kept), device=labels.device) - (counts.cumsum(0) - counts)[labels]
        longest = max(1, int(counts.max())) if len(kept) else 1
        return kept, labels * longest + within, longest

    def gather(self, tensor: Tensor, axis: int) -> Tensor:
        """(..., positions, ...) -> (..., n, T, ...): examples first, then the positions of each, padded with zeros."""
        if self.regular is not None:
            outer, inner = self.regular
            if outer == 1:
                return tensor.unflatten(axis, (self.n, inner))
            return tensor.unflatten(axis, (outer, self.n, inner)).transpose(axis, axis + 1).flatten(axis + 1, axis + 2)
        kept, slots, longest = self.places
        shape = (*tensor.shape[:axis], self.n * longest, *tensor.shape[axis + 1 :])
        padded = tensor.new_zeros(shape).index_copy_(axis, slots, tensor.index_select(axis, kept))
        return padded.unflatten(axis, (self.n, longest))

    def sums(self, entries: Float[Tensor, "..."]) -> Float[Tensor, " n"]:
        """The entries of each example added up."""
        if self.axis is not None:
            return self.gather(entries, self.axis).movedim(self.axis, 0).flatten(1).sum(1)
        labels = self.labels.clamp_min(0).flatten()
        return entries.new_zeros(self.n).index_add_(0, labels, entries.flatten())

    def everywhere(self, shape: torch.Size) -> Int[Tensor, "..."]:
        """The label of every entry of a signal of this shape, to be broadcast."""
        if self.axis is None:
            return self.labels
        return self.labels.reshape([-1 if axis == self.axis else 1 for axis in range(len(shape))])

    def like(self, n: int, shape: torch.Size) -> "Owner | None":
        """The same layout for n examples in a signal of this shape; None where it does not carry over."""
        if self.axis is None or self.regular is None:
            return None
        outer, inner = self.regular
        if self.axis >= len(shape) or shape[self.axis] != outer * n * inner:
            return None
        return Owner(n, self.axis, self.device, self.regular)

    @property
    def silent(self) -> bool:
        """The signal is zero for all examples."""
        return self.regular is None and not bool((self.labels >= 0).any())


def exponents(n: int, dtype: torch.dtype, device: torch.device) -> list[Int[Tensor, " n"]]:
    """Exponents of two for each example, one set for each backward pass; all sets together tell every example.

    The first set alone distinguishes neighbours, and almost every pair of examples.
    """
    base = 2 * REACH.get(dtype, REACH[torch.float32])
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu")
    digits, rest = [shuffled % base], shuffled // base
    while bool(rest.any()):
        digits.append(rest % base)
        rest = rest // base
    return [(digit - base // 2).to(device) for digit in digits]


def power_of_two(exponent: Int[Tensor, "*n"], dtype: torch.dtype) -> Float[Tensor, "*n"]:
    """``2^exponent``, exactly: the exponent's bits of a float32. A GPU compiles ``exp2`` at its first use.

    >>> power_of_two(torch.tensor([-32, 0, 5]), torch.float64).log2()
    tensor([-32.,   0.,   5.], dtype=torch.float64)
    """
    return ((exponent.int() + 127) << 23).view(torch.float32).to(dtype)


def regular_owner(plain: Tensor, scaled: Tensor, weights: Float[Tensor, " n"]) -> Owner | None:
    """A regular layout along one axis, where one product by the examples' weights and one comparison prove it."""
    if plain.dim() == 0:
        return None
    n = len(weights)
    if not plain.numel() or (not bool(plain[0].any()) and not bool(plain.any())):  # which tells nothing of the layout
        return Owner(n, 0, plain.device, found=torch.full((len(plain),), -1, device=plain.device))
    for axis, (outer, inner) in _regular_layouts(plain, scaled, weights):
        owner = Owner(n, axis, plain.device, (outer, inner))
        by_example = weights.to(plain.real.dtype).reshape(-1, *[1] * (plain.dim() - axis))
        expected = (plain.unflatten(axis, (outer, n, inner)) * by_example).flatten(axis, axis + 2)
        if _agree(expected, scaled, owner):
            return owner
    return None


def _regular_layouts(plain: Tensor, scaled: Tensor, weights: Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """Axes and layouts (outer, inner) that signals may have: examples first, then what their largest entries tell."""
    n = len(weights)
    if len(plain) % n == 0:
        yield 0, (1, len(plain) // n)
    for axis in (axis for axis, length in enumerate(plain.shape) if length % n == 0):
        largest, other = (t.abs().movedim(axis, 0).reshape(t.shape[axis], -1).amax(1) for t in (plain, scaled))
        ratios = torch.log2(other / largest).round()  # NaN where all is zero
        known = ~ratios.isnan()
        if 2 * int(known.sum()) > len(known):
            yield from ((axis, layout) for layout in _fitting(ratios, known, weights.log2().round()))


def find_owner(plain: Tensor, scaled: Sequence[Tensor], digits: Sequence[Int[Tensor, " n"]]) -> Owner | None:
    """The owner of signals in any layout; None where some entry serves several examples."""
    if plain.dim() == 0:
        return None
    n = len(digits[0])
    base = 2 * REACH.get(plain.real.dtype, REACH[torch.float32])
    zero = plain == 0
    code = torch.zeros(plain.shape, dtype=torch.long, device=plain.device)
    for place, tensor in enumerate(scaled):
        exponent = _ratio(plain, tensor, zero)
        if not bool(torch.isfinite(exponent).all()):
            return None
        code += (exponent.round().long() + base // 2).clamp(0, base - 1) * base**place
    shuffled = sum((digit + base // 2) * base**place for place, digit in enumerate(digits))
    assert isinstance(shuffled, Tensor)
    example = torch.full((base ** len(digits),), -1, device=plain.device)
    example[shuffled] = torch.arange(n, device=plain.device)
    labels = example[code].masked_fill(zero, -1)
    if bool(((labels < 0) & ~zero).any()):
        return None
    for tensor, digit in zip(scaled, digits, strict=True):
        expected = plain * power_of_two(digit, plain.real.dtype)[labels.clamp_min(0)]
        if not _agree(expected, tensor, Owner(n, None, plain.device, found=labels)):
            return None
    axis, found = next(_by_axis(labels), (None, labels))  # the axis whose position alone tells the example
    return Owner(n, axis, plain.device, found=found)


def without_vanished(plain: Tensor, scaled: Sequence[Tensor]) -> list[Tensor]:
    """The signals, with zeros where powers of two would take them out of the range of their dtype.

    Gradients that vanish over many time steps end so small that they are no longer scaled exactly. No product of two of
    them can be represented. float16 has no such numbers to spare.
    """
    dtype = plain.real.dtype
    limit = 0.0 if dtype == torch.float16 else torch.finfo(dtype).tiny * 4.0 ** REACH.get(dtype, REACH[torch.float32])
    vanished = plain.abs() <= limit
    return [signal.masked_fill(vanished, 0) for signal in (plain, *scaled)]


def mixes(plain: Tensor, scaled: Tensor) -> bool:
    """Some entry does not scale by a power of two, even to rounding: it serves several examples."""
    exponent = _ratio(plain, scaled, plain == 0)
    return not bool((exponent.round() - exponent).abs().max() <= 0.1) if exponent.numel() else False


def _ratio(plain: Tensor, scaled: Tensor, zero: Tensor) -> Tensor:
    """By which power of two each entry was scaled."""
    size, other = (t.abs().double() for t in (plain, scaled))
    return torch.log2(other / size.where(~zero, 1)).where(~zero, 0.0)


def _agree(expected: Tensor, found: Tensor, owner: Owner) -> bool:
    """Equal, or equal to rounding for every example by itself, so that a large one hides nothing in the others."""
    if torch.equal(expected, found):
        return True
    if int((found != 0).sum()) < FEWEST.get(found.real.dtype, FEWEST[torch.float32]):
        return False
    gap, size = (owner.sums(t.abs().double().square()) for t in (expected - found, found))
    return bool((gap <= ROUNDING.get(found.real.dtype, ROUNDING[torch.float32]) ** 2 * size).all())


def tells_layout(signal: Tensor, owner: Owner) -> bool:
    """Do the entries that are not zero fit the layout of their owner alone? For one example any layout is right."""
    labels = torch.where(signal == 0, -1, owner.everywhere(signal.shape))
    examples = torch.arange(owner.n, device=signal.device)
    layouts = ((axis, layout) for axis, top in _by_axis(labels) for layout in _fitting(top, top >= 0, examples))
    return owner.n == 1 or all(layout == (owner.axis, owner.regular) for layout in layouts)


def _by_axis(labels: Int[Tensor, "..."]) -> Iterator[tuple[int, Int[Tensor, " positions"]]]:
    """Axes along which each position belongs to one example at most, and to which: -1 where the signal is zero."""
    for axis in range(labels.dim()):
        by_position = labels.movedim(axis, 0).reshape(labels.shape[axis], -1)
        if by_position.shape[1] == 0:
            continue
        top = by_position.amax(1)
        if bool(((by_position == top[:, None]) | (by_position < 0)).all()):
            yield axis, top


def _fitting(found: Tensor, known: Bool[Tensor, " positions"], given: Tensor) -> Iterator[tuple[int, int]]:
    """All (outer, inner) such that positions, as far as known, lie as (outer, example, inner), ``given`` for each."""
    each, rest = divmod(len(found), len(given))
    for inner in (inner for inner in range(each, 0, -1) if rest == 0 and each % inner == 0):
        outer = each // inner
        if bool(((found == given.repeat_interleave(inner).repeat(outer)) | ~known).all()):
            yield outer, inner
