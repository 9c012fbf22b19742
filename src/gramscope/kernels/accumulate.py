"""From the sites of two sets of examples to their kernel: the pieces of each parameter, added in strips of rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gramscope.capture import LookupSite, OuterSite, RowSite, Site
from gramscope.kernels.contractions import (
    HalfPiece,
    LookupPiece,
    Piece,
    PositionPiece,
    Positions,
    RowPiece,
    Shape,
    Side,
    TiedPiece,
    cheapest,
    each_side,
    rectangles,
    strips,
)

Sites = Mapping[str, Sequence[Site]]
# Bytes of gradient rows held at a time: enough that their products are large, or fill the GPU.
CHUNK = {"cpu": 2**26, "cuda": 2**31}
# Fewest and most rows of the kernel matrix computed in one go, and how fine strips are cut on the diagonal: fewest rows
# and parts of a strip. Tall strips amortise reading the other side, small ones waste less of a symmetric kernel's other
# half; a GPU wants few and large products.
STRIP_ROWS = {"cpu": (320, 1280, 80, 8), "cuda": (640, 2560, 128, 2)}
# The part of a site's positions up to which only those with signals are contracted.
FEWER = 0.9
MIRRORED = 256  # rows of a kernel at once


class Accumulator:
    """Adds the kernels of sites to ``targets``: one for each parameter, or one under "" for all.

    Targets are (n, m) for a trace, (n, c, m, d) otherwise; of a symmetric one the upper half is added, and mirrored at
    the end. ``chunk`` bytes of gradient rows are held at once. ``split`` takes products of rows on the tensor cores.
    """

    def __init__(
        self, targets: Mapping[str, Tensor], trace: bool, symmetric: bool, chunk: int | None = None, split: bool = False
    ) -> None:
        some = next(iter(targets.values()))
        self.targets, self.symmetric, self.trace, self.total = targets, symmetric, trace, "" in targets
        self.chunk = CHUNK.get(some.device.type, CHUNK["cuda"]) if chunk is None else chunk
        self.n, self.m = (some.shape[0], some.shape[1]) if trace else (some.shape[0], some.shape[2])
        self.dtype, self.split = some.dtype, split and some.dtype == torch.float32
        self._matrices = {name: as_matrix(target) for name, target in targets.items()}
        self._everywhere: set[str] = set()  # parameters with signals at nearly all positions

    def add(self, left: Sites, right: Sites) -> None:
        """Add the kernels of some parameters; ``right`` is ``left`` itself where the kernel is symmetric.

        In a total a bias is fused into its weight's piece.
        """
        fused = _fusible_biases(left, right) if self.total else {}
        for name in left:
            if name not in fused.values() and left[name] and right[name]:
                target = self._matrices["" if self.total else name]
                for piece in self._parameter(left[name], right[name], 1.0 if name in fused else 0.0):
                    self._add_strips(piece, target)
                    del piece  # or it would be held while the next is made

    def finish(self) -> None:
        """Fill in the lower half of symmetric kernels, and put tiles that were copies in their places."""
        for name, target in self.targets.items():
            matrix = self._matrices[name]
            if self.symmetric:
                mirror(matrix)
            if matrix.data_ptr() != target.data_ptr():
                target.add_(matrix.view(target.shape))

    def _add_strips(self, piece: Piece, target: Tensor) -> None:
        n, m = self.n, self.m
        c, d = len(target) // n, target.shape[1] // m
        smallest, largest, leaf, finer = STRIP_ROWS.get(target.device.type, STRIP_ROWS["cuda"])
        if isinstance(piece, RowPiece) and piece.split:
            smallest, finer = largest, 1  # tensor cores want large products
        rows_at_once = min(largest, max(smallest, len(target) // (8 if target.is_cuda else 4)))
        size = min(n, piece.most, max(1, rows_at_once // c))
        finest = min(size, max(1, leaf // c, size // finer))
        for rows, cols in rectangles(n, m, size, finest, self.symmetric):
            piece.add(target[rows[0] * c : rows[1] * c, cols[0] * d : cols[1] * d], rows, cols)

    # The pieces of one parameter -------------------------------------------------------------------

    def _parameter(self, left: Sequence[Site], right: Sequence[Site], offset: float) -> Iterator[Piece]:
        parts_left = _merge(left)
        parts_right = parts_left if right is left else _merge(right)
        if _independent([*parts_left, *parts_right]):
            for key in parts_left.keys() & parts_right.keys():
                yield from self._part(parts_left[key], parts_right[key], offset)
        elif (tied := _tied(parts_left, parts_right)) is not None:
            yield from self._tied_parts(*tied)
        else:
            yield self._rows(summed_rows, left, right)

    def _part(self, left: Site, right: Site, offset: float) -> Iterator[Piece]:
        if left.entries == 0 or any(_unused(site) for site in (left, right)):
            return
        if isinstance(left, OuterSite) and isinstance(right, OuterSite):
            yield from self._outer(left, right, offset)
        elif isinstance(left, LookupSite) and isinstance(right, LookupSite):
            signals = each_side(lambda site: site.signals.to(self.dtype), left, right)
            yield LookupPiece(left.ids, right.ids, *signals, self.trace)
        else:
            yield self._rows(lambda site: site.rows(), left, right)

    def _rows(self, rows: Callable[[Side], Tensor], left: Side, right: Side) -> Piece:
        return RowPiece(*each_side(lambda side: rows(side).to(self.dtype), left, right), self.trace, self.split)

    def _outer(self, left: OuterSite, right: OuterSite, offset: float) -> Iterator[Piece]:
        left, right = each_side(self._at_signals, left, right)
        shape = Shape(
            n=left.examples, m=right.examples, k=left.directions, T=max(left.positions, right.positions), g=left.groups,
            i=left.fan_in, o=left.fan_out, symmetric=right is left, trace=self.trace,
        )  # fmt: skip
        method = cheapest(shape, left.signals.device.type)
        if offset == 0 and method == "rows":
            yield from self._outer_rows(left, right)
            return
        inputs = each_side(lambda site: site.inputs.to(self.dtype).unbind(2), left, right)
        signals = each_side(lambda site: site.signals.to(self.dtype).unbind(3), left, right)
        for v, w, s, t in zip(*inputs, *signals, strict=True):
            inner = Positions(v, w, offset)
            if method == "half":
                yield HalfPiece(inner, s, t, self.chunk)
            else:
                yield PositionPiece(inner, s, t, self.trace, self.chunk)

    def _at_signals(self, site: OuterSite) -> OuterSite:
        """Only the positions that have signals: in the last block of a transformer, say, those that the outputs read.

        Where nearly all had in one pass, the next is not asked: a GPU would have to stop and answer. A few positions
        less are not worth a copy of the others.
        """
        if site.positions == 1 or site.name in self._everywhere:
            return site
        for signals in (site.signals[:1, :1], site.signals):  # one example and direction mostly tell
            positions = _has_signals(signals).nonzero()[:, 0]
            if len(positions) > FEWER * site.positions:
                self._everywhere.add(site.name)
                return site
        if not len(positions):
            return site
        return replace(
            site,
            signals=site.signals.index_select(2, positions),
            inputs_of=lambda examples: site.inputs_of(examples).index_select(1, positions),
        )

    def _outer_rows(self, left: OuterSite, right: OuterSite) -> Iterator[Piece]:
        """Gradient rows, as many output channels at a time as may be held of all examples."""
        examples = left.examples if right is left else left.examples + right.examples
        bytes_each = examples * left.directions * left.groups * left.fan_in * self.dtype.itemsize
        for low, high in strips(left.fan_out, max(1, self.chunk // max(1, bytes_each))):

            def rows(site: OuterSite, channels: slice = slice(low, high)) -> Tensor:
                entries = site.groups * (channels.stop - channels.start) * site.fan_in
                shape = site.examples, site.directions, entries
                return site.channel_rows(channels, site.signals.new_empty(shape, dtype=self.dtype))

            yield self._rows(rows, left, right)

    def _tied_parts(self, outer: tuple[OuterSite, ...], lookup: tuple[LookupSite, ...]) -> Iterator[Piece]:
        yield from self._part(outer[0], outer[-1], 0.0)
        yield from self._part(lookup[0], lookup[-1], 0.0)
        for linear, table, flip in ((outer[0], lookup[-1], False), (outer[-1], lookup[0], True)):
            inputs, signals = linear.inputs[:, :, 0].to(self.dtype), linear.signals[:, :, :, 0].to(self.dtype)
            yield TiedPiece(inputs, signals, table.ids, table.signals.to(self.dtype), self.trace, flip, self.chunk)


def as_matrix(target: Tensor) -> Tensor:
    """A target as a matrix: a view where memory allows, zeros of its size otherwise."""
    if target.dim() == 2:
        return target
    n, c, m, d = target.shape
    try:
        return target.view(n * c, m * d)
    except RuntimeError:
        return target.new_zeros(n * c, m * d)


def kernel_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Half precision is contracted in float32; a complex parameter is two real ones."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32).to_real()


def mirror(matrix: Tensor) -> None:
    """Copy the upper triangle of a symmetric matrix onto the lower one."""
    for start, stop in strips(len(matrix), MIRRORED):
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T


def summed_rows(sites: Sequence[Site]) -> Float[Tensor, "n k p"]:
    """The gradient of a parameter over all its uses, in the parameter's own entries."""
    total = sites[0].whole_rows()
    for site in sites[1:]:
        total = total + site.whole_rows()
    return total


def _has_signals(signals: Float[Tensor, "n k T g o"]) -> Bool[Tensor, " T"]:
    everything_else = (0, 1, 3, 4)
    return (signals.amin(everything_else) != 0) | (signals.amax(everything_else) != 0)


def _unused(site: Site) -> bool:
    """No position of these examples came here (an expert that was given no token)."""
    return isinstance(site, OuterSite | LookupSite) and site.signals.shape[2] == 0


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
    if isinstance(first, RowSite):
        return replace(first, gradient=torch.stack([use.rows() for use in uses]).sum(0))
    signals = torch.cat([use.held for use in uses], dim=2)
    if isinstance(first, OuterSite):
        inputs = torch.cat([use.inputs for use in uses if isinstance(use, OuterSite)], dim=1)
        return replace(first, inputs_of=inputs.__getitem__, signals=signals)
    assert isinstance(first, LookupSite)
    ids = torch.cat([use.ids for use in uses if isinstance(use, LookupSite)], dim=1)
    return replace(first, ids=ids, signals=signals)


def _independent(keys: Sequence[object]) -> bool:
    """No two parts of the parameter overlap: one part, or views of disjoint entries (q, k, v of one projection)."""
    unique = list(dict.fromkeys(keys))
    if len(unique) == 1:
        return True
    frames = [key[1] for key in unique]  # type: ignore[index]
    if any(frame is None for frame in frames):
        return False
    covered = torch.cat([frame.entries for frame in frames])
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
    biases: dict[object, str] = {}
    weights: dict[object, str] = {}
    for name in left:
        sites = (*left[name], *right[name])
        if len(left[name]) == len(right[name]) == 1 and left[name][0].entries:
            memory = tuple((site.held.data_ptr(), site.held.numel()) for site in sites)
            if all(isinstance(site, RowSite) and site.rule == "bias" for site in sites):
                biases[memory] = name
            elif all(isinstance(site, OuterSite) and site.positions == site.groups == 1 for site in sites):
                weights.setdefault(memory, name)
    return {name: biases[memory] for memory, name in weights.items() if memory in biases}
