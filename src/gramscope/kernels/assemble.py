"""From the sites of two snapshots to the pieces of their kernel."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.capture import LookupSite, OuterSite, RowSite, Site
from gramscope.kernels.cost import Shape, cheapest
from gramscope.kernels.pieces import (
    ConstantSignalPiece,
    HadamardPiece,
    HadamardTracePiece,
    HalfPiece,
    Piece,
    Positions,
    PositionTracePiece,
    RowPiece,
    SameId,
    TiedPiece,
)  # fmt: skip

Sites = Mapping[str, Sequence[Site]]
# Bytes of signals and inputs that are turned into gradient rows at once.
CACHED = {"cpu": 2**23, "cuda": 2**31}
# Rows of so few entries (gains, offsets) are joined to those of other parameters.
NARROW = 128


@dataclass(frozen=True)
class Assembly:
    """How to assemble: traced over outputs or not, in which dtype, how many bytes of rows to hold, by halves or not."""

    trace: bool
    dtype: torch.dtype
    chunk: int
    split: bool = False
    held: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def pieces(self, mine: Sites, theirs: Sites, fuse: bool) -> Iterator[tuple[str, Piece, bool]]:
        """Pieces of every parameter, with its name, and whether it is narrow and may wait to be joined with others.

        If ``fuse``, a bias is fused into its weight's piece.
        """
        fused = _fusible_biases(mine, theirs) if fuse else {}
        for name in mine:
            if name in fused.values() or not mine[name] or not theirs[name]:
                continue
            # Rows that are made here lie in memory which the next ones take over; those of the sites may wait.
            may_wait = fuse and all(isinstance(site, RowSite) for site in (*mine[name], *theirs[name]))
            for piece in self._parameter(mine[name], theirs[name], 1.0 if name in fused else 0.0):
                yield name, piece, may_wait and isinstance(piece, RowPiece) and piece.left.shape[1] <= NARROW

    def _parameter(self, left: Sequence[Site], right: Sequence[Site], offset: float) -> Iterator[Piece]:
        parts_left = _merge(left)
        parts_right = parts_left if right is left else _merge(right)
        if _independent([*parts_left, *parts_right]):
            for key in parts_left.keys() & parts_right.keys():
                yield from self._part(parts_left[key], parts_right[key], offset)
        elif (tied := _tied(parts_left, parts_right)) is not None:
            yield from self._tied_parts(*tied)
        else:
            yield from self._summed_rows(left, right)

    def _part(self, left: Site, right: Site, offset: float) -> Iterator[Piece]:
        if left.entries == 0 or any(_unused(site) for site in (left, right)):
            return
        if isinstance(left, OuterSite) and isinstance(right, OuterSite):
            yield from self._outer(left, right, offset)
        elif isinstance(left, LookupSite) and isinstance(right, LookupSite):
            signals = left.signals.to(self.dtype)
            others = signals if right is left else right.signals.to(self.dtype)
            inner = SameId(left.ids, right.ids, self.dtype)
            yield (
                PositionTracePiece(inner, signals, others)
                if self.trace
                else HalfPiece(inner, signals, others, self.chunk)
            )
        else:
            rows = left.rows().to(self.dtype)
            yield RowPiece(rows, rows if right is left else right.rows().to(self.dtype), self.trace, self.split)

    # Outer products --------------------------------------------------------------------------------

    def _outer(self, left: OuterSite, right: OuterSite, offset: float) -> Iterator[Piece]:
        shape = Shape(
            n=left.examples, m=right.examples, k=left.directions, T=max(left.positions, right.positions), g=left.groups,
            i=left.fan_in, o=left.fan_out, symmetric=right is left, trace=self.trace,
        )  # fmt: skip
        if offset == 0 and cheapest(shape, left.signals.device.type) == "rows":
            yield from self._outer_rows(left, right)
            return
        inputs = left.inputs.to(self.dtype)
        others = inputs if right is left else right.inputs.to(self.dtype)
        for group in range(left.groups):
            s = left.signals[:, :, :, group].to(self.dtype)
            t = s if right is left else right.signals[:, :, :, group].to(self.dtype)
            v, w = inputs[:, :, group], others[:, :, group]
            if shape.T == 1:
                yield _one_position(v, w, s[:, :, 0], t[:, :, 0], offset, self.trace)
            elif self.trace:
                yield PositionTracePiece(Positions(v, w, offset), s, t)
            else:
                yield HalfPiece(Positions(v, w, offset), s, t, self.chunk)

    def _outer_rows(self, left: OuterSite, right: OuterSite) -> Iterator[Piece]:
        """Gradient rows, some output channels at a time."""
        examples = left.examples if right is left else left.examples + right.examples
        for channels in self._channel_steps(left, examples):
            rows = self._channel_rows(left, channels, 0)
            yield RowPiece(
                rows, rows if right is left else self._channel_rows(right, channels, 1), self.trace, self.split
            )

    def _channel_steps(self, site: OuterSite, examples: int) -> Iterator[slice]:
        """Output channels, as many at a time as may be held as rows of all examples."""
        bytes_each = examples * site.directions * site.groups * site.fan_in * self.dtype.itemsize
        step = max(1, min(site.fan_out, self.chunk // max(1, bytes_each)))
        for start in range(0, site.fan_out, step):
            yield slice(start, min(site.fan_out, start + step))

    def _channel_rows(self, site: OuterSite, channels: slice, side: int) -> Float[Tensor, "n k p"]:
        """``Σ_T s ⊗ v`` for some output channels, a few examples at a time so that their copies stay in the cache."""
        k, T, g = site.directions, site.positions, site.groups
        width = channels.stop - channels.start
        rows = self._scratch(side, site.signals, (site.examples, k, g * width * site.fan_in))
        each = T * g * (k * width + site.fan_in) * self.dtype.itemsize
        few = max(1, min(site.examples, CACHED.get(rows.device.type, CACHED["cuda"]) // max(1, each)))
        for start in range(0, site.examples, few):
            part = slice(start, min(site.examples, start + few))
            inputs = site.inputs_of(part).to(self.dtype).transpose(1, 2)  # (n, g, T, i)
            batch = (part.stop - part.start) * g
            inputs = inputs.reshape(batch, T, -1)
            signals = site.signals[part, ..., channels].to(self.dtype)  # (n, k, T, g, o)
            if g == 1 and signals.stride(2) == 1 and signals.stride(1) > signals.stride(0):
                # Images, one direction after the other in memory.
                for direction, own in enumerate(rows[part].unflatten(2, (width, -1)).unbind(1)):
                    own.baddbmm_(signals[:, direction, :, 0].mT, inputs, beta=0)
                continue
            if signals.stride(2) == 1:
                signals = signals.permute(0, 3, 1, 4, 2).reshape(batch, k * width, T)
            else:
                signals = signals.permute(0, 3, 2, 1, 4).reshape(batch, T, k * width).mT
            if g == 1:
                torch.bmm(signals, inputs, out=rows[part].view(batch, k * width, -1))
            else:
                product = torch.bmm(signals, inputs).unflatten(0, (-1, g)).unflatten(2, (k, width))
                rows[part] = product.transpose(1, 2).flatten(2)
        return rows

    def _scratch(self, side: int, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory that is used again by the next rows: fresh memory costs the CPU more than the copy into it."""
        size = math.prod(shape)
        held = self.held.get(side)
        if held is None or held.numel() < size:
            held = self.held[side] = torch.empty(size, dtype=self.dtype, device=like.device)
        return held[:size].view(shape)

    # Several kinds of use of one parameter ---------------------------------------------------------

    def _tied_parts(self, outer: tuple[OuterSite, ...], lookup: tuple[LookupSite, ...]) -> Iterator[Piece]:
        yield from self._part(outer[0], outer[-1], 0.0)
        yield from self._part(lookup[0], lookup[-1], 0.0)
        for linear, table, flip in ((outer[0], lookup[-1], False), (outer[-1], lookup[0], True)):
            inputs, signals = linear.inputs[:, :, 0].to(self.dtype), linear.signals[:, :, :, 0].to(self.dtype)
            yield TiedPiece(inputs, signals, table.ids, table.signals.to(self.dtype), self.trace, flip)

    def _summed_rows(self, left: Sequence[Site], right: Sequence[Site]) -> Iterator[Piece]:
        rows = summed_rows(left).to(self.dtype)
        yield RowPiece(rows, rows if right is left else summed_rows(right).to(self.dtype), self.trace, self.split)


def summed_rows(sites: Sequence[Site]) -> Float[Tensor, "n k p"]:
    """The gradient of a parameter over all its uses, in the parameter's own entries."""
    total = sites[0].whole_rows()
    for site in sites[1:]:
        total = total + site.whole_rows()
    return total


def _unused(site: Site) -> bool:
    """No position of these examples came here (an expert that was given no token)."""
    return isinstance(site, OuterSite | LookupSite) and site.signals.shape[2] == 0


def _one_position(
    v: Float[Tensor, "n 1 i"], w: Float[Tensor, "m 1 i"], s: Float[Tensor, "n k o"], t: Float[Tensor, "m j o"],
    offset: float, trace: bool,
) -> Piece:  # fmt: skip
    if trace:
        return HadamardTracePiece(Positions(v, w, offset), s, t)
    inner = v[:, 0] @ w[:, 0].T
    if offset:
        inner += offset
    if _constant(s, t):
        gram = s[0] @ s[0].T
        if int(torch.count_nonzero(gram)) <= 2 * len(gram):
            return ConstantSignalPiece(inner, gram)
    return HadamardPiece(inner, s, t)


def _constant(s: Float[Tensor, "n k o"], t: Float[Tensor, "m j o"]) -> bool:
    """All examples have the same signals; the last is looked at first, because it mostly settles the question."""
    first = s[:1]
    if not torch.equal(first[0], s[-1]) or not torch.equal(first[0], t[-1]):
        return False
    return bool((s == first).all()) and (t is s or bool((t == first).all()))


def _merge(sites: Sequence[Site]) -> dict[object, Site]:
    """Uses of the same kind and frame become one site with all their positions; cross terms follow by themselves."""
    grouped: dict[object, list[Site]] = {}
    for site in sites:
        kind: tuple[object, ...] = (type(site), site.frame)
        if isinstance(site, OuterSite):
            kind += (site.axes, site.order, site.groups, site.fan_in)
        grouped.setdefault(kind, []).append(site)
    return {key: _joined(uses) for key, uses in grouped.items()}


def _joined(uses: Sequence[Site]) -> Site:
    first = uses[0]
    if len(uses) == 1:
        return first
    if isinstance(first, OuterSite):
        outers = [use for use in uses if isinstance(use, OuterSite)]
        inputs = torch.cat([use.inputs for use in outers], dim=1)
        signals = torch.cat([use.signals for use in outers], dim=2)
        return OuterSite(
            first.name,
            first.rule,
            first.frame,
            inputs.__getitem__,
            signals,
            first.fan_in,
            first.axes,
            first.order,
        )
    if isinstance(first, LookupSite):
        lookups = [use for use in uses if isinstance(use, LookupSite)]
        ids = torch.cat([use.ids for use in lookups], dim=1)
        signals = torch.cat([use.signals for use in lookups], dim=2)
        return LookupSite(first.name, first.rule, first.frame, ids, signals, first.table)
    total = first.rows().clone()
    for use in uses[1:]:
        total += use.rows()
    return RowSite(first.name, first.rule, first.frame, total)


def _independent(keys: Sequence[object]) -> bool:
    """No two parts of the parameter overlap: one part, or views of disjoint entries (q, k, v of one projection)."""
    unique = list(dict.fromkeys(keys))
    if len(unique) == 1:
        return True
    frames = [key[1] for key in unique]  # type: ignore[index]
    if any(frame is None for frame in frames):
        return False
    covered = torch.cat([frame.index() for frame in frames])
    return len(covered.unique()) == len(covered)


def _tied(
    left: dict[object, Site], right: dict[object, Site]
) -> tuple[tuple[OuterSite, ...], tuple[LookupSite, ...]] | None:
    """Exactly one linear and one lookup part over the same whole table, on both sides."""
    outer, lookup = [], []
    for parts in (left, right):
        if len(parts) != 2:
            return None
        for site in parts.values():
            if isinstance(site, OuterSite) and site.frame is None and site.order == (0, 1) and site.groups == 1:
                outer.append(site)
            elif isinstance(site, LookupSite) and site.frame is None:
                lookup.append(site)
    return (tuple(outer), tuple(lookup)) if len(outer) == len(lookup) == 2 else None


def _fusible_biases(left: Sites, right: Sites) -> dict[str, str]:
    """weight name -> bias name, where both see the very same signals at one position: ``K = (Q + 1) ∘ (S Sᵀ)``."""
    memory = {}
    for name, sites in left.items():
        if len(sites) == 1 and isinstance(sites[0], RowSite) and sites[0].rule == "bias" and len(right[name]) == 1:
            memory[sites[0].gradient.data_ptr(), sites[0].gradient.shape] = name
    fused = {}
    for name, sites in left.items():
        site = sites[0] if len(sites) == 1 and len(right[name]) == 1 else None
        if isinstance(site, OuterSite) and site.positions == 1 and site.groups == 1:
            key = site.signals.data_ptr(), torch.Size((site.examples, site.directions, site.fan_out))
            if key in memory and _same_signals(right[name][0], right[memory[key]][0]):
                fused[name] = memory.pop(key)
    return fused


def _same_signals(outer: Site, bias: Site) -> bool:
    return (
        isinstance(outer, OuterSite)
        and isinstance(bias, RowSite)
        and outer.positions == 1
        and outer.signals.data_ptr() == bias.gradient.data_ptr()
        and outer.signals.numel() == bias.gradient.numel()
    )
