"""Ways to contract the weight sites of two sets of examples: what each costs, and how it adds its share to a kernel.

The kernel is a matrix of blocks: row block μ, column block ν, each (c, c) with c the number of outputs that stay open
(k for a full kernel, 1 for a trace). A piece holds what it needs in the layout its matrix products want.

For one pair of examples with k directions, T positions, g groups, fan-in i and fan-out o (multiply-adds):

===========  =======================================  ==========================================
method       full kernel                              trace over outputs
===========  =======================================  ==========================================
rows         k²·g·o·i                                 k·g·o·i
positions    T²·g·i + k²·T²·g·o                       T²·g·i + k·T²·g·o
half         T²·g·i + k·T²·g·o + k²·T·g·o             (as positions)
===========  =======================================  ==========================================

``rows`` forms each example's gradient first, which costs k·T·g·o·i once an example; it wins where positions are many.
``half`` contracts the input Gram matrix with one side's signals before it meets the other side.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gramscope.base.arithmetic import onednn_pays, product_with_transpose
from gramscope.linalg.split_product import Halves, add_split_product, split_halves, split_product_pays

Range = tuple[int, int]
Side = TypeVar("Side")
Made = TypeVar("Made")
# Columns of one product: longer sums in float32 lose a digit.
LONGEST = 2**13
# On a GPU small products are cut into shorter sums, so that FULL tiles of TILE rows and columns are computed at once.
SHORTEST, ALIGNED, TILE, FULL = 2**10, 2**6, 2**7, 2**11
# Entries of such sums that are held at once.
SUMMED = 2**26
# Bytes that the cross term of a tied table holds.
TIED = {"cpu": 2**20, "cuda": 2**31}
# Positions below which the products of ``half``, which sum over T terms each, take longer than their count: they move
# more than they compute. Channels below which ``positions`` does, which writes and reads each sum over the channels.
# Measured with 2 to 65 positions of 96 to 512 channels on a CPU, 4 to 197 positions of 256 to 4,608 on an H200.
FEW_POSITIONS = {"cpu": 20, "cuda": 36}
FEW_CHANNELS = {"cpu": 64, "cuda": 128}

Method = Literal["rows", "positions", "half"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one contraction: n and m examples, k directions, T positions, g groups, fan-in i, fan-out o."""

    n: int
    m: int
    k: int
    T: int
    g: int
    i: int
    o: int
    symmetric: bool
    trace: bool


def flops(shape: Shape, method: Method) -> int:
    """Floating-point operations of the matrix products, two for each multiply-add; the pairs halved if symmetric."""
    pairs = shape.n * (shape.n + 1) // 2 if shape.symmetric else shape.n * shape.m
    k, T, g, i, o = shape.k, shape.T, shape.g, shape.i, shape.o
    outputs = k if shape.trace else k * k
    examples = shape.n if shape.symmetric else shape.n + shape.m
    if method == "rows":
        return 2 * (pairs * outputs * g * o * i + examples * k * T * g * o * i)
    if method == "positions":
        return 2 * pairs * T * T * g * (i + outputs * o)
    return 2 * pairs * (T * T * g * i + k * T * T * g * o + outputs * T * g * o)


def price(shape: Shape, method: Method, device: str = "cpu") -> float:
    """Time in units of operations of large products."""
    slower = 0.0
    if method == "half":
        slower = (FEW_POSITIONS.get(device, FEW_POSITIONS["cuda"]) / shape.T) ** 2
    elif method == "positions" and shape.T > 1:
        slower = FEW_CHANNELS.get(device, FEW_CHANNELS["cuda"]) / (shape.o * (shape.k if shape.trace else 1))
    return flops(shape, method) * (1.0 + slower)


def cheapest(shape: Shape, device: str = "cpu") -> Method:
    """The method that takes the least time by these counts; ties go to the simplest."""
    methods: tuple[Method, ...] = ("positions", "rows") if shape.T == 1 else ("rows", "positions", "half")
    return min(methods[:2] if shape.trace else methods, key=lambda method: price(shape, method, device))


def each_side(make: Callable[[Side], Made], left: Side, right: Side) -> tuple[Made, Made]:
    """``make`` of both sides; once where they are one."""
    first = make(left)
    return first, first if right is left else make(right)


class Piece:
    """A share of a kernel. ``most`` is the number of examples of the rows that it wants at once."""

    most = 2**62

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        """Add ``K[rows, cols]`` to ``out``, a (possibly strided) view with (r1-r0)·c rows."""
        raise NotImplementedError


class RowPiece(Piece):
    """``K = J Jᵀ`` for gradient rows J."""

    def __init__(
        self, left: Float[Tensor, "n k p"], right: Float[Tensor, "m j p"], trace: bool, split: bool = False
    ) -> None:
        self.blocks = (1, 1) if trace else (left.shape[1], right.shape[1])
        self.left, self.right = each_side(lambda t: t.flatten(1) if trace else t.flatten(0, 1), left, right)
        length = self.left.shape[1]
        self.split = split and split_product_pays(self.left.device, len(self.left), len(self.right), length)

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        c, d = self.blocks
        mine, theirs = slice(rows[0] * c, rows[1] * c), slice(cols[0] * d, cols[1] * d)
        if self.split:
            left, right = self._halves
            add_split_product(out, left[mine], right[theirs])
        else:
            add_product(out, self.left[mine], self.right[theirs])

    @cached_property
    def _halves(self) -> tuple[Halves, Halves]:
        return each_side(split_halves, self.left, self.right)


def add_product(out: Tensor, left: Float[Tensor, "r p"], right: Float[Tensor, "q p"]) -> None:
    """``out += left rightᵀ`` in sums of bounded length; on a GPU many at once."""
    if onednn_pays(out, len(left) * right.numel()):
        out += product_with_transpose(left, right)
        return
    size, at_once = LONGEST, 1
    if out.is_cuda:
        tiles = math.ceil(len(left) / TILE) * math.ceil(len(right) / TILE)
        size = min(LONGEST, max(SHORTEST, left.shape[1] * tiles // FULL // ALIGNED * ALIGNED))
        at_once = max(1, SUMMED // max(1, out.numel()))
    add_in_parts(out, left, right, size, at_once)


def add_in_parts(out: Tensor, left: Float[Tensor, "r p"], right: Float[Tensor, "q p"], size: int, at_once: int) -> None:
    """``out += left rightᵀ`` in sums of ``size`` terms, ``at_once`` of them in one batched product."""
    for start, stop in strips(left.shape[1], at_once * size):
        count = (stop - start) // size
        rest = start + count * size if count > 1 else start
        if count > 1:
            some, others = (t[:, start:rest].unflatten(1, (count, size)).transpose(0, 1) for t in (left, right))
            out += torch.bmm(some, others.mT).sum(0)
        if rest < stop:
            out.addmm_(left[:, rest:stop], right[:, rest:stop].T)


class HalfPiece(Piece):
    """``K_{μc,νd} = Σ_pq Q_{μp,νq} s_{μcp} · s_{νdq}``: Q meets the signals of the columns first, row after row."""

    most = 1

    def __init__(
        self, inner: "Positions", left: Float[Tensor, "n k T o"], right: Float[Tensor, "m j S o"], chunk: int = 2**31
    ) -> None:
        self.inner = inner
        self.left, self.right = each_side(lambda t: t.mT.contiguous(), left, right)  # (n, k, o, T)
        each = self.right[0, ..., 0].numel() * left.shape[2] * left.element_size()
        self.columns = max(1, chunk // max(1, each))

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        k, j = self.left.shape[1], self.right.shape[1]
        for place, row in enumerate(range(*rows)):
            mine = self.left[row].flatten(1)  # (k, o·T)
            for low, high in strips(cols[1] - cols[0], self.columns):
                some = cols[0] + low, cols[0] + high
                gram = self.inner.block((row, row + 1), some).unflatten(0, (high - low, -1))  # (m, S, T)
                carried = torch.bmm(self.right[slice(*some)].flatten(1, 2), gram)  # (m, j·o, T)
                target = out[place * k : (place + 1) * k, low * j : high * j]
                add_product(target, mine, carried.view((high - low) * j, -1))


class Positions:
    """Which positions of two examples see alike inputs: the Gram matrix of site inputs, block by block."""

    def __init__(self, left: Float[Tensor, "n T i"], right: Float[Tensor, "m S i"], offset: float = 0.0) -> None:
        self.left, self.right = each_side(Tensor.contiguous, left, right)
        self.offset = offset

    def block(self, rows: Range, cols: Range) -> Float[Tensor, "mS nT"]:
        """(columns · positions, rows · positions)."""
        right = self.right[cols[0] : cols[1]].flatten(0, 1)
        gram = product_with_transpose(right, self.left[rows[0] : rows[1]].flatten(0, 1))
        return gram.add_(self.offset) if self.offset else gram


class LookupPiece(Piece):
    """``K_{μc,νd} = Σ_pq [id_μp = id_νq] s_{μcp} · s_{νdq}``: a table of which rows were looked up.

    Signals of a row's example are added up by id, and read at the ids of the columns.
    """

    most = 1

    def __init__(
        self, ids: Int[Tensor, "n T"], others: Int[Tensor, "m S"], left: Float[Tensor, "n k T o"],
        right: Float[Tensor, "m j S o"], trace: bool,
    ) -> None:  # fmt: skip
        self.ids, self.others = ids, others
        self.left, self.right = each_side(_outputs_inside if trace else Tensor.contiguous, left, right)

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        (k, T, o), ids, right = self.left.shape[1:], self.others[slice(*cols)], self.right[slice(*cols)]
        m, j, S = right.shape[:3]
        for place, row in enumerate(range(*rows)):
            own = self.ids[row]
            by_id = self.left.new_zeros(k, T + 1, o).index_add_(1, _first_place(own, own), self.left[row])
            found = by_id.index_select(1, _first_place(own, ids.flatten())).view(k, m, S, o)
            if S * o > LONGEST and found.is_cuda:  # position by position: sums of bounded length, enough to fill a GPU
                share = torch.einsum("kmSo,mjSo->mSkj", found, right).sum(1)
            else:
                share = torch.bmm(found.flatten(2).transpose(0, 1), right.flatten(2).mT)  # (m, k, j)
            out[place * k : (place + 1) * k].unflatten(1, (m, j)).add_(share.transpose(0, 1))


def _first_place(own: Int[Tensor, " T"], ids: Int[Tensor, " q"]) -> Int[Tensor, " q"]:
    """Where each id first stands in ``own``; T where it does not."""
    same = ids[:, None] == own
    return torch.where(same.any(1), same.to(torch.uint8).argmax(1), len(own))


def _outputs_inside(signals: Float[Tensor, "n k T o"]) -> Float[Tensor, "n 1 T ko"]:
    """A trace sums over outputs as over channels."""
    return signals.transpose(1, 2).flatten(2)[:, None].contiguous()


class PositionPiece(Piece):
    """``K_{μc,νd} = Σ_pq Q_{μp,νq} s_{μcp} · s_{νdq}``; a trace sums over outputs as over channels."""

    def __init__(
        self, inner: Positions, left: Float[Tensor, "n k T o"], right: Float[Tensor, "m j S o"], trace: bool,
        chunk: int = 2**31,
    ) -> None:  # fmt: skip
        self.inner = inner
        self.left, self.right = each_side(_outputs_inside if trace else Tensor.contiguous, left, right)
        # Bytes of an example of the rows: which positions are alike, by signals and by inputs, and with all columns.
        each = 2 * self.left[0, ..., 0].numel() * self.right[..., 0].numel() * self.left.element_size()
        self.most = max(1, chunk // max(1, each))

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        left, right = self.left[slice(*rows)], self.right[slice(*cols)]  # (n, k, T, o), (m, j, S, o)
        gram = self.inner.block(rows, cols)
        (n, k, T, _), (m, j, S, _) = left.shape, right.shape
        if T == S == 1:
            both = product_with_transpose(left.flatten(0, 2), right.flatten(0, 2)).view(n, k, m * j)
            # Each column repeated for its outputs, so that the product runs along whole rows of memory.
            out.unflatten(0, (n, k)).addcmul_(gram.T.repeat_interleave(j, dim=1)[:, None], both)
        else:
            both = product_with_transpose(right.flatten(0, 2), left.flatten(0, 2)).view(m, j, S, n, k, T)
            out.add_(both.mul_(gram.view(m, 1, S, n, 1, T)).sum((2, 5)).flatten(0, 1).flatten(1).T)


class TiedPiece(Piece):
    """The cross term of a table used both as an embedding and as a linear layer (tied input and output weights).

    ``K_{μc,νd} = Σ_pq s_{μcp}[id_νq] (v_μp · t_νdq)``: linear signals s and inputs v on one side, ids and lookup
    signals t on the other. ``flip`` puts the linear side on the columns.
    """

    def __init__(
        self, inputs: Float[Tensor, "n T i"], signals: Float[Tensor, "n k T table"], ids: Int[Tensor, "m S"],
        looked_up: Float[Tensor, "m j S i"], trace: bool, flip: bool, chunk: int = 2**31,
    ) -> None:  # fmt: skip
        self.inputs, self.signals, self.ids, self.looked_up = inputs, signals, ids, looked_up
        self.trace, self.flip = trace, flip
        each = 2 * looked_up[0, ..., 0].numel() * inputs.shape[1] * inputs.element_size()
        most = min(chunk, TIED.get(inputs.device.type, TIED["cuda"]))
        self.pairs = max(1, most // max(1, each))  # that are held at once

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        if self.flip:
            out, rows, cols = out.T, cols, rows
        k, j = (1, 1) if self.trace else (self.signals.shape[1], self.looked_up.shape[1])
        sums = "nkTmS,nTmkS->nm" if self.trace else "nkTmS,nTmjS->nkmj"
        for low, high in strips(rows[1] - rows[0], self.pairs):
            some = slice(rows[0] + low, rows[0] + high)
            for start, stop in strips(cols[1] - cols[0], max(1, self.pairs // (high - low))):
                ids, signals = (t[cols[0] + start : cols[0] + stop] for t in (self.ids, self.looked_up))
                at_ids = self.signals[some].index_select(3, ids.flatten()).unflatten(3, ids.shape)
                aligned = torch.einsum("nTi,mkSi->nTmkS", self.inputs[some], signals)
                share = torch.einsum(sums, at_ids, aligned).reshape((high - low) * k, -1)
                out[low * k : high * k, start * j : stop * j].add_(share)


def strips(n: int, size: int) -> Iterator[Range]:
    """Ranges of at most ``size`` that cover 0..n."""
    for start in range(0, n, size):
        yield start, min(n, start + size)


def even_size(n: int, most: int) -> int:
    """The least size of ranges that covers 0..n with no more of them than ``most`` needs.

    >>> even_size(10, 9)
    5
    """
    return math.ceil(n / math.ceil(n / most))


def rectangles(n: int, m: int, size: int, smallest: int, upper: bool, start: int = 0) -> Iterator[tuple[Range, Range]]:
    """Rows and columns that cover an n x m kernel, or the upper triangle of a symmetric one with little beyond it.

    The triangle is cut into strips right of the diagonal; the squares on the diagonal are cut again, four times finer.
    """
    if not upper:
        for rows in strips(n, size):
            yield rows, (0, m)
        return
    for low, high in strips(n, size):
        rows = start + low, start + high
        if size <= smallest or high - low == 1:
            yield rows, (rows[0], start + n)
            continue
        if high < n:
            yield rows, (rows[1], start + n)
        yield from rectangles(high - low, high - low, max(smallest, size // 4), smallest, True, rows[0])
