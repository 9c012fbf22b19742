"""How to cut a kernel into blocks that stay within a memory budget, and whether its examples may be cut so."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.base.memory_budget import Memory, free_memory, memory_budget
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.capturing import ForwardOptions, Survey, survey
from gramscope.capture.known_sites import KnownSites
from gramscope.capture.network import count_examples, same_outputs, slice_examples
from gramscope.capture.sites import UNFOLDED
from gramscope.kernels.accumulate import CHUNK, STRIP_ROWS
from gramscope.kernels.contractions import Shape, cheapest, even_size, price, strips

# Bytes of signals held at a time, where there is room.
SIGNALS = {"cpu": 2**25, "cuda": 2**31}
# Devices that go back one output at a time, from so many bytes of the largest tensor of a forward pass on.
ONE_BY_ONE, LARGE = {"cuda"}, 2**25
# How many times as long contractions of a trace must take one output at a time for a GPU to take several together, and
# how many times fewer examples it may then hold.
WORTH, SMALLER_BLOCKS = 1.2, 3
# The part of the budget that gradient rows take, and that signals do beside what the finest cut needs: where there is
# room, and at least.
SHARE, LEAST_SHARE = 8, 32
FEW = 3  # examples that are looked at first: what they take, and where their sites are
# Tensors of the size of a signal that the search for sites compares it by, in float64, beside two directions of all.
SEARCHED = 12
# Inputs and models whose forward pass will fit, and whose sites are found as soon in all examples as in a few first:
# entries of x, so many for each id (it stands for a vector), parameters.
SMALL_INPUT, ID, SMALL_MODEL = 2**16, 64, 10**7


@dataclass(frozen=True)
class Block:
    """Some examples and some outputs; all outputs for a trace."""

    examples: slice
    outputs: slice


@dataclass(frozen=True)
class Plan:
    """Blocks of the rows and of the columns of a kernel, and the bytes of gradient rows and of signals to hold at once.

    ``budget`` is for everything. ``passes`` outputs of a trace are contracted together (0: as many as fit). ``large``
    work on a GPU goes back one output at a time. ``most_examples`` are those for which a forward pass fits. ``known``
    are the sites of the first examples.
    """

    budget: int
    n: int
    m: int
    rows: tuple[Block, ...]
    columns: tuple[Block, ...]
    chunk: int
    signals: int
    passes: int
    large: bool = False
    most_examples: int = 0
    known: KnownSites | None = None


def make_plan(
    model: nn.Module, x: ModelInput, x2: ModelInput, *, trace: bool, blocked: bool, memory: Memory,
    separate: bool = False, **options: Unpack[ForwardOptions],
) -> Plan:  # fmt: skip
    """Blocks such that forward passes, signals, rows and the kernel itself fit into ``memory`` bytes.

    ``separate``: the signals of all sites of one side are held while those of the other come.
    """
    n = count_examples(x)
    m = n if x2 is None else count_examples(x2)
    device = tensors_in(x)[0].device
    budget = memory_budget(memory, device)
    together, large = n if x2 is None else n + m, device.type in ONE_BY_ONE
    size = None
    if blocked and not (memory is None and is_small(model, x)):
        look = partial(_survey, model, x, n, **options)
        size = look(large=large)
        if size is not None and large and together * size.largest < LARGE:
            large, size = False, look(large=False) if size.fused else size  # else it would be the same
    if size is None:
        every = [Block(slice(0, count), slice(0, None)) for count in (n, m)]
        return Plan(budget, n, m, (every[0],), (every[1],), *_shares(budget // SHARE, device), passes=0)
    width = size.outputs
    kernel = n * m * (1 if trace else width * width) * torch.promote_types(size.dtype, torch.float32).itemsize
    needs = _Needs(size, trace, kernel, device, separate)
    budget = check_room(needs.least(), f"this kernel of {n} x {m} examples and {width} outputs", budget, memory, device)
    columns = width
    examples = needs.examples(budget, together, max(n, m), 1 if trace else width)
    if examples == 0:
        examples, columns = 1, _most(width, lambda count: needs.fit(budget, 2, 2 * count))
    one_by_one = trace and large and needs.saved_together(together, width) < WORTH
    if trace and large and not one_by_one:
        # Contracted together, outputs hold more signals: it pays as long as blocks do not get much smaller.
        smaller = needs.examples(budget, together, max(n, m), width)
        examples = smaller if SMALLER_BLOCKS * smaller >= examples else examples
    # Blocks of one size leave more memory beside them than full ones and a rest.
    sizes = [even_size(count, examples) for count in (n, m)]
    columns = even_size(width, columns)
    together = min(together, sum(sizes))
    passes = width
    if trace:
        fitting = _most(width, lambda count: needs.fit(budget, together, count, share=SHARE))
        passes = 1 if one_by_one else even_size(width, max(1, fitting))
    rows, cols = (_blocks(count, size, width, columns) for count, size in zip((n, m), sizes, strict=True))
    most_examples = max(2 * examples, (budget - kernel) // (2 * size.held))
    shares = needs.shares(budget, together, passes if trace else min(width, 2 * columns))
    return Plan(budget, n, m, rows, cols, *shares, passes, large, most_examples, size.known)


@dataclass(frozen=True)
class _Needs:
    """Bytes that a kernel of ``kernel`` bytes takes, by the number of examples and directions that are held at once."""

    size: Survey
    trace: bool
    kernel: int
    device: torch.device
    separate: bool = False

    def examples(self, budget: int, together: int, most: int, directions: int) -> int:
        """How many examples of the rows, and as many of the columns, can be held at once; 0 where not even one can."""
        if self.fit(budget, together, directions, whole=True):
            return most
        return _most(most, lambda count: self.fit(budget, 2 * count, directions))

    def saved_together(self, examples: int, outputs: int) -> float:
        """How many times a trace costs if its outputs are contracted one by one, where inputs meet anew for each."""

        def cost(k: int) -> float:
            shapes = [Shape(examples, examples, k, T, g, i, o, True, True) for T, g, i, o, _ in self.size.outer]
            return sum(price(shape, cheapest(shape, self.device.type), self.device.type) for shape in shapes)

        return outputs * cost(1) / max(1.0, cost(outputs))

    def fit(self, budget: int, examples: int, directions: int, whole: bool = False, share: int = LEAST_SHARE) -> bool:
        shared = self._shared(budget // share, examples, directions)
        return self._fixed(examples, directions, whole) + shared <= budget

    def shares(self, budget: int, examples: int, directions: int) -> tuple[int, int]:
        """Bytes of gradient rows and of signals to hold at once: half of what is left to each."""
        left = (budget - self._fixed(examples, directions, whole=False)) // 2
        return _shares(min(budget // SHARE, max(budget // LEAST_SHARE, left)), self.device)

    def least(self) -> int:
        """The smallest budget: one example of the rows, one of the columns, one output of each; and the first look."""
        fixed = self._fixed(2, 1 if self.trace else 2, whole=False)
        shared = self._shared(2**62, 2, 1 if self.trace else 2)
        rest = min(fixed * LEAST_SHARE // (LEAST_SHARE - 2), fixed + shared) + LEAST_SHARE
        return max(rest, FEW * (self.size.held + self._search))

    def _fixed(self, examples: int, directions: int, whole: bool) -> int:
        """Forward pass, signals that must be held at once, inputs that are made anew, the kernel and its work space."""
        size, item = self.size, torch.promote_types(self.size.dtype, torch.float32).itemsize
        by_example = by_few = 0
        for T, g, i, o, anew in size.outer:
            shape = Shape(examples, examples, directions, T, g, i, o, symmetric=False, trace=self.trace)
            inputs = T * g * i * item if anew else 0
            if cheapest(shape, self.device.type) == "rows":
                by_few = max(by_few, inputs)
            else:
                by_example = max(by_example, inputs)
        rows = examples * (1 if self.trace else directions)
        strip = 2 * min(rows, STRIP_ROWS["cuda"][1]) * rows * item  # computed in one go, each with a copy
        copy = 0 if whole or self.trace else (rows // 2) ** 2 * item
        # A batched pass takes an operation it cannot batch one direction at a time, and then stacks the results.
        working = size.signals if self.separate else size.working
        working += 0 if directions == 1 else size.largest
        products = examples * (directions * working + by_example) + min(examples, UNFOLDED) * by_few + strip + copy
        search = self._search if self.separate or not size.known.found else _searching(*size.unsure)
        return self.kernel + examples * size.held + max(products, examples * search)

    @property
    def _search(self) -> int:
        """Bytes for an example."""
        return _searching(self.size.working, self.size.largest)

    def _shared(self, share: int, examples: int, directions: int) -> int:
        """Gradient rows and signals, where they need their share."""
        chunk, signals = _shares(share, self.device)
        item = torch.promote_types(self.size.dtype, torch.float32).itemsize
        rows = max((g * i * o for T, g, i, o, _ in self.size.outer if T > 1), default=0) * item
        count = examples * directions
        return min(chunk, count * rows) + min(signals, count * self.size.signals)


def _searching(working: int, largest: int) -> int:
    return 2 * working + SEARCHED * largest


def _shares(share: int, device: torch.device) -> tuple[int, int]:
    """Bytes of gradient rows and of signals to hold at once, no more than they profit from."""
    chunk, signals = (most.get(device.type, most["cuda"]) for most in (CHUNK, SIGNALS))
    return min(share, chunk), min(share, signals)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, where each smaller one does too; 0 where none does."""
    return bisect_left(range(1, limit + 1), True, key=lambda count: not fits(count))


def check_blocks(plan: Plan, outputs: Callable[[ModelInput], Tensor], x: ModelInput, x2: ModelInput) -> None:
    """Refuse where blocks of a plan would give another kernel than the batch as a whole.

    The outputs of blocks are compared with those of the batch, or of as much of it as fits, without gradients. Dropout,
    statistics of the batch, its order, and inputs that all examples share but that have as many rows as there are
    examples (which are then cut like these) show in them.
    """
    for batch, n, blocks in ((x, plan.n, plan.rows), (x2, plan.m, plan.columns)):
        ranges = list(dict.fromkeys((block.examples.start, block.examples.stop) for block in blocks))
        if batch is None or len(ranges) == 1:
            continue
        each = torch.cat([outputs(slice_examples(batch, n, slice(*some))) for some in ranges])
        for start, stop in strips(n, even_size(n, plan.most_examples)):  # larger than the ranges
            if not same_outputs(each[start:stop], outputs(slice_examples(batch, n, slice(start, stop)))):
                raise CoupledExamplesError(
                    f"the memory allows {ranges[0][1]} of {n} examples at a time. They must give the same outputs as "
                    "in one batch, but the outputs depend on the other examples in the batch. Is the model in "
                    "training mode (dropout, batch norm)? Or does an input that all examples share have as many rows "
                    "as there are examples? Call model.eval(), give shared inputs in outputs=lambda model, x: ..., or "
                    "give more memory."
                )


def check_room(need: int, what: str, budget: int, memory: Memory, device: torch.device) -> int:
    """The budget; where none was given, more than half of what is free if that is needed. Refuse what will not fit."""
    if memory is None and need > budget:
        budget = max(budget, min(free_memory(device), need))
    if need > budget:
        got = f"{budget:,} are free" if memory is None else f"got {budget:,}"
        raise InputError(
            f"memory must be at least {need:,} bytes for {what}, {got}. Give more, choose fewer outputs, "
            'reduce="trace", or use gs.ntk_operator.'
        )
    return budget


def is_small(model: object, x: ModelInput) -> bool:
    """A forward pass of all examples may be made at once, before it is known what it takes."""
    if not isinstance(model, nn.Module):
        return False  # and others will say so
    entries = sum(t.numel() * (1 if t.is_floating_point() else ID) for t in tensors_in(x))
    return 0 < entries <= SMALL_INPUT and sum(p.numel() for p in model.parameters() if not is_lazy(p)) <= SMALL_MODEL


def _blocks(n: int, examples: int, width: int, columns: int) -> tuple[Block, ...]:
    parts = [slice(*part) for part in strips(width, columns)]
    return tuple(Block(slice(*some), part) for some in strips(n, examples) for part in parts)


def _survey(model: nn.Module, x: ModelInput, n: int, large: bool, **options: Unpack[ForwardOptions]) -> Survey | None:
    """Sizes from a few examples; None where the model takes no part of its batch, for whatever reason."""
    try:
        return survey(model, slice_examples(x, n, slice(0, min(n, FEW))), large=large, **options)
    except Exception:
        return None  # what is wrong with the whole batch, the capture will say
