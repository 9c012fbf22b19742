"""The empirical neural tangent kernel, site by site, without a Jacobian."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from functools import reduce as reduce_with
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError
from gramscope.base.memory import Memory
from gramscope.base.pages import fresh_zeros, keep_freed_blocks
from gramscope.base.progress import progress
from gramscope.capture import Snapshot, capture
from gramscope.capture.capture import Coupled, captured_by_example, outputs_of
from gramscope.capture.network import Outputs, slice_examples
from gramscope.capture.precision import Precision
from gramscope.kernels.assemble import Assembly
from gramscope.kernels.blocks import check_blocks
from gramscope.kernels.factored import FactoredPiece, PairedPiece
from gramscope.kernels.memory import CHUNK, Block, Plan, is_small, make_plan
from gramscope.kernels.parts import Opened, capture_in_parts, from_one_pass
from gramscope.kernels.pieces import (
    ConstantSignalPiece,
    HadamardPiece,
    HadamardTracePiece,
    HalfPiece,
    Piece,
    Range,
    TiedPiece,
    rectangles,
    strips,
)

Reduce = Literal["none", "trace"]
# Fewest and most rows of the kernel matrix computed in one go, and how fine strips are cut on the diagonal: fewest rows
# and parts of a strip. Tall strips amortise reading the other side, small ones waste less of a symmetric kernel's other
# half; a GPU wants few and large products.
STRIP_ROWS = {"cpu": (320, 1280, 80, 8), "cuda": (640, 2560, 640, 1)}
STRIP_EXAMPLES = 16  # for pieces that loop over examples
PAIRED_ROWS = {"cpu": 80, "cuda": 1280}  # rows of the kernel for which pairs of outputs are held at once
# Entries of one tile of S Sᵀ: on the CPU it should still be in the cache when it meets Q.
TILE = {"cpu": 2**19, "cuda": 2**40}
# Rows that are mirrored at once.
MIRRORED = {"cpu": 96, "cuda": 128}
LIGHT = (HadamardPiece, HadamardTracePiece, ConstantSignalPiece)
WHOLE = (HalfPiece, TiedPiece, FactoredPiece, PairedPiece)  # strips that are not cut again on the diagonal


@overload
def ntk(
    model: nn.Module, x: Any, x2: Any = ..., reduce: Reduce = ..., by_site: Literal[False] = ...,
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision = ..., frozen: bool = ...,
    coupled: Coupled = ...,
) -> Tensor: ...  # fmt: skip


@overload
def ntk(
    model: nn.Module, x: Any, x2: Any = ..., reduce: Reduce = ..., *, by_site: Literal[True],
    outputs: Outputs = ..., memory: Memory = ..., precision: Precision = ..., frozen: bool = ...,
    coupled: Coupled = ...,
) -> dict[str, Tensor]: ...  # fmt: skip


def ntk(
    model: nn.Module,
    x: Any,
    x2: Any = None,
    reduce: Reduce = "none",
    by_site: bool = False,
    outputs: Outputs = None,
    memory: Memory = None,
    precision: Precision = None,
    frozen: bool = False,
    coupled: Coupled = "refuse",
) -> Tensor | dict[str, Tensor]:
    """The neural tangent kernel ``K_{μc,νd} = Σ_θ ∂f_c(x_μ)/∂θ · ∂f_d(x_ν)/∂θ``.

    Each weight site ``u = W v`` contributes ``Σ_pq (v_μp · v_νq)(s_μcp · s_νdq)`` with ``s = ∂f/∂u``, evaluated in the
    cheapest order (see ``gramscope.kernels.cost``); one backward pass for each output, whatever the number of examples.

    Args:
        model: any module.
        x, x2: examples of the rows and of the columns (the same if x2 is None); a tensor, a tuple or a dict.
        reduce: "none" gives (n, C, m, C); "trace" sums over equal outputs and gives (n, m).
        by_site: a dict parameter name -> kernel of that parameter alone; they sum to the total.
        outputs: columns of the flattened output, or a function of (model, x) that returns (n, ...).
        memory: bytes to stay within, as a number or a size such as "2GB"; half of what is free if None. Results do not
            depend on it but for rounding. Coupled examples (``coupled="exact"``) are taken together whatever it says.
        precision, frozen, coupled: see ``gramscope.capture``.

    References: Jacot et al. 2018 (arXiv:1806.07572); the site form is theory 1 of the docs, ``K = Σ_ℓ Q^{ℓ-1} ∘ G^ℓ``.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> x = torch.eye(3)
        >>> gs.ntk(model, x, reduce="trace")
        tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]])
    """
    if reduce not in ("none", "trace"):
        raise InputError(f'reduce must be "none" or "trace", got {reduce!r}.')
    keep_freed_blocks()
    options: dict[str, Any] = {"outputs": outputs, "frozen": frozen, "precision": precision}
    take = partial(capture, model, coupled=coupled, **options)
    opened: Opened = partial(captured_by_example, model, coupled=coupled, **options)
    trace, blocked = reduce == "trace", coupled == "refuse"
    planned = partial(make_plan, model, x, x2, trace=trace, blocked=blocked, memory=memory, **options)
    with torch.no_grad(), exact_arithmetic(tf32=precision == "tf32"):
        small = memory is None and blocked and is_small(model, x)
        plan, first = _at_once(opened, planned, x, trace) if small else (planned(), None)
        check_blocks(plan, partial(outputs_of, model, **options), x, x2)
        kernels = _Job(take, opened, plan, trace=trace, by_site=by_site).run(x, x2, first)
    return kernels if by_site else kernels[""]


def _at_once(opened: Opened, planned: Callable[..., Plan], x: Any, trace: bool) -> tuple[Plan, Snapshot | None]:
    """One forward pass tells what a capture takes, and is the one to go back from; it is gone when this returns."""
    with opened(x) as one_pass:
        plan = planned(size=one_pass.survey())
        return plan, from_one_pass(one_pass, plan.n, plan.part, trace) if len(plan.rows) == 1 else None


@dataclass
class _Job:
    """Captures blocks of examples and adds up their kernels."""

    take: partial[Snapshot]
    opened: Opened
    plan: Plan
    trace: bool
    by_site: bool

    def run(self, x: Any, x2: Any, first: Snapshot | None) -> dict[str, Tensor]:
        """``first`` is the snapshot of the first block of rows, if there is one already."""
        symmetric = x2 is None
        if self.plan.one_by_one:
            # Coupled examples show only in company: look at the first two once.
            pair = slice_examples(x, self.plan.n, slice(0, 2))
            self.take(pair, directions=torch.ones(1, 2, self.plan.outputs, device="cpu"))
        first = first or self._capture(x, self.plan.n, self.plan.rows[0])
        kernels = self._allocate(first)
        with progress("kernel, row of blocks", len(self.plan.rows)) as advance:
            for place, mine in enumerate(self.plan.rows):
                left = self._capture(x, self.plan.n, mine) if place else first
                others = self.plan.rows[place:] if symmetric else self.plan.columns
                for theirs in others:
                    if self.trace and theirs.outputs != mine.outputs:
                        continue
                    same = symmetric and theirs is mine
                    right = left if same else self._capture(x if symmetric else x2, self.plan.m, theirs)
                    self._add(left, right, mine, theirs, kernels)
                advance()
        if symmetric:
            for kernel in kernels.values():
                _mirror(kernel.view(self.plan.n * self._width, self.plan.m * self._width))
        return kernels

    @property
    def _width(self) -> int:
        return 1 if self.trace else self.plan.outputs

    def _capture(self, x: Any, n: int, block: Block) -> Snapshot:
        part = x if block.examples == (0, n) else slice_examples(x, n, slice(*block.examples))
        size = block.examples[1] - block.examples[0]
        if block.outputs == (0, self.plan.outputs):
            if self.plan.part is not None:
                return capture_in_parts(self.take, self.opened, part, size, self.plan.part, self.trace)
            return self.take(part)
        start, stop = block.outputs
        # Rows of the identity; the whole of it may not fit.
        some = torch.zeros(stop - start, 1, self.plan.outputs, device="cpu")
        some[range(stop - start), 0, range(start, stop)] = 1
        return self.take(part, directions=some.expand(-1, size, -1))

    def _allocate(self, snapshot: Snapshot) -> dict[str, Tensor]:
        n, m = self.plan.n, self.plan.m
        self.plan = self.plan.with_outputs(snapshot.outputs.shape[1])
        width = self.plan.outputs
        shape = (n, m) if self.trace else (n, width, m, width)
        names = snapshot.parameters if self.by_site else [""]
        device, dtype = snapshot.outputs.device, _kernel_dtype(snapshot)
        return {name: fresh_zeros(shape, dtype, device) for name in names}

    def _add(self, left: Snapshot, right: Snapshot, mine: Block, theirs: Block, kernels: dict[str, Tensor]) -> None:
        """Add the kernel of two blocks to its place; only the upper half of a symmetric one."""
        width = self._width
        if left.outputs.shape[1] != right.outputs.shape[1]:
            raise InputError(
                f"x and x2 must give the same number of outputs, got {left.outputs.shape[1]} and "
                f"{right.outputs.shape[1]}. Choose outputs that both have, or use gs.ntk_operator, which takes them so."
            )
        dtype = next(iter(kernels.values())).dtype
        assembly = Assembly(self.trace, dtype, self.plan.chunk)
        tiles = {name: _Tile.of(kernel, mine, theirs, width) for name, kernel in kernels.items()}
        light: list[tuple[Tensor, Piece]] = []
        for name, piece in assembly.pieces(left, right, fuse=not self.by_site):
            target = tiles[name if self.by_site else ""].matrix
            if isinstance(piece, LIGHT):
                light.append((target, piece))
            else:
                self._add_strips([(target, piece)], left.examples, right.examples, right is left)
        self._add_strips(light, left.examples, right.examples, right is left)
        for tile in tiles.values():
            tile.put_back()

    def _add_strips(self, work: Sequence[tuple[Tensor, Piece]], n: int, m: int, upper: bool) -> None:
        """All pieces of one size in turn on each rectangle, while it is in the cache."""
        for target, size in {(id(t), _strip(p, t, n)): (t, _strip(p, t, n)) for t, p in work}.values():
            mine = [p for t, p in work if t is target and _strip(p, t, n) == size]
            c, d = len(target) // n, target.shape[1] // m
            leaf, finer = STRIP_ROWS.get(target.device.type, STRIP_ROWS["cuda"])[2:]
            finest = size if isinstance(mine[0], WHOLE) else min(size, max(1, leaf // c, size // finer))
            for rows, all_cols in rectangles(n, m, size, finest, upper):
                for cols in _tiles(mine, rows, all_cols, c * d, target.device.type):
                    for piece in mine:
                        piece.add(target[rows[0] * c : rows[1] * c, cols[0] * d : cols[1] * d], rows, cols)


def _tiles(pieces: Sequence[Piece], rows: Range, cols: Range, width: int, device: str) -> Iterator[Range]:
    """Columns of a rectangle in parts that stay in the cache, where its pieces are light work for each entry."""
    if not isinstance(pieces[0], (*LIGHT, PairedPiece)):
        yield cols
        return
    few = max(1, TILE.get(device, TILE["cuda"]) // ((rows[1] - rows[0]) * width))
    for start, stop in strips(cols[1] - cols[0], few):
        yield cols[0] + start, cols[0] + stop


def contracted(snapshot: Snapshot, *, trace: bool, by_site: bool) -> dict[str, Tensor]:
    """The kernel of the directions of one snapshot: by parameter name, or under "" their sum."""
    n, k = snapshot.examples, snapshot.directions
    block = Block((0, n), (0, k))
    plan = Plan(n, n, k, (block,), (block,), CHUNK.get(snapshot.outputs.device.type, CHUNK["cuda"]))
    job = _Job(partial(capture), partial(captured_by_example), plan, trace, by_site)
    kernels = job._allocate(snapshot)
    job._add(snapshot, snapshot, block, block, kernels)
    for kernel in kernels.values():
        _mirror(kernel.view(n * job._width, n * job._width))
    return kernels


@dataclass
class _Tile:
    """The part of a kernel that two blocks fill, as a matrix; a copy where it is no contiguous range of rows."""

    part: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, kernel: Tensor, mine: Block, theirs: Block, width: int) -> "_Tile":
        (r0, r1), (c0, c1) = mine.examples, theirs.examples
        if kernel.dim() == 2:
            part = kernel[r0:r1, c0:c1]
            return cls(part, part)
        if mine.outputs == theirs.outputs == (0, width):
            matrix = kernel.view(len(kernel) * width, -1)[r0 * width : r1 * width, c0 * width : c1 * width]
            return cls(matrix, matrix)
        part = kernel[r0:r1, slice(*mine.outputs), c0:c1, slice(*theirs.outputs)]
        return cls(part, part.new_zeros(part.shape[0] * part.shape[1], part.shape[2] * part.shape[3]))

    def put_back(self) -> None:
        if self.matrix is not self.part:
            self.part.add_(self.matrix.view(self.part.shape))


def _strip(piece: Piece, target: Tensor, n: int) -> int:
    """Examples in one strip of rows."""
    if isinstance(piece, HalfPiece):
        return piece.strip
    if isinstance(piece, TiedPiece):
        return STRIP_EXAMPLES
    if isinstance(piece, PairedPiece):
        return max(1, PAIRED_ROWS.get(target.device.type, PAIRED_ROWS["cuda"]) // piece.outputs)
    smallest, largest, *_ = STRIP_ROWS.get(target.device.type, STRIP_ROWS["cuda"])
    rows = min(largest, max(smallest, len(target) // 8 if target.is_cuda else len(target) // 4))
    return max(1, rows * n // len(target))


def _mirror(matrix: Tensor) -> None:
    """Copy the upper triangle of a symmetric matrix onto the lower one."""
    size = MIRRORED.get(matrix.device.type, MIRRORED["cuda"])
    lower = torch.ones(size, size, dtype=torch.bool, device=matrix.device).tril(-1)
    for start, stop in strips(len(matrix), size):
        corner = matrix[start:stop, start:stop]
        corner.copy_(torch.where(lower[: stop - start, : stop - start], corner.T, corner))
        rows = matrix[start:stop, stop:]
        # On the CPU through a copy that stays in the cache: read along the rows, then turned.
        matrix[stop:, start:stop] = rows.T if rows.is_cuda else rows.contiguous().T


def _kernel_dtype(snapshot: Snapshot) -> torch.dtype:
    """The widest dtype of outputs and signals; half-precision networks are contracted in float32."""
    dtypes = {snapshot.outputs.dtype, *(site.dtype for site in snapshot.sites)}
    return reduce_with(torch.promote_types, dtypes, torch.float32)
