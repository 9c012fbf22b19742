"""How to cut a kernel into blocks that stay within a memory budget, and whether its examples may be cut so."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramscope.base.errors import CoupledExamplesError, GramscopeError, InputError
from gramscope.base.memory_budget import Memory, free_memory, memory_budget
from gramscope.base.nested import tensors_in
from gramscope.capture.capture import Survey, survey
from gramscope.capture.network import Outputs, Precision, count_examples, same_outputs, slice_examples
from gramscope.kernels.contractions import Range, strips

# Bytes of gradient rows held at a time: enough that their products are large, or fill the GPU.
CHUNK = {"cpu": 2**26, "cuda": 2**31}
# Bytes of signals held at a time, where there is room.
SIGNALS = {"cpu": 2**25, "cuda": 2**31}
# Bytes of the largest tensor of a forward pass from which on a GPU is busy with one direction at a time.
LARGE = 2**25
# Tensors of the largest site that are held at once for each direction: its signals, as they came and arranged for their
# products, what crosses to the next part of the network, and what autograd works on.
OVERHEAD = 6
# Inputs and models whose forward pass will fit: entries of x, so many for each id (it stands for a vector), parameters.
SMALL_INPUT, ID, SMALL_MODEL = 2**18, 64, 10**7


@dataclass(frozen=True)
class Block:
    """Some examples and some outputs."""

    examples: Range
    outputs: Range


@dataclass(frozen=True)
class Plan:
    """Blocks of the rows and of the columns of a kernel, and the bytes of gradient rows and of signals to hold at once.

    ``outputs`` is -1 until it is known. ``passes`` outputs of a trace are taken in one backward pass; ``large`` work on
    a GPU takes them one by one; ``company`` is the number of examples for which a forward pass fits.
    """

    n: int
    m: int
    outputs: int
    rows: tuple[Block, ...]
    columns: tuple[Block, ...]
    chunk: int
    signals: int
    passes: int
    large: bool = False
    company: int = 0

    @property
    def whole(self) -> bool:
        """All examples and outputs at once."""
        return len(self.rows) == 1 and len(self.columns) == 1


def make_plan(
    model: nn.Module, x: Any, x2: Any, *, trace: bool, blocked: bool, memory: Memory, outputs: Outputs,
    frozen: bool, precision: Precision,
) -> Plan:  # fmt: skip
    """Blocks such that forward passes, signals, rows and the kernel itself fit into ``memory`` bytes."""
    n = count_examples(x)
    m = n if x2 is None else count_examples(x2)
    device = tensors_in(x)[0].device
    budget = memory_budget(memory, device)
    chunk = min(budget // 8, CHUNK.get(device.type, CHUNK["cuda"]))
    signals = min(budget // 8, SIGNALS.get(device.type, SIGNALS["cuda"]))
    small = memory is None and is_small(model, x)
    size = None if small or not blocked else _survey(model, x, n, outputs=outputs, frozen=frozen, precision=precision)
    if size is None:
        every = Block((0, n), (0, -1)), Block((0, m), (0, -1))
        return Plan(n, m, -1, every[:1], every[1:], chunk, signals, passes=0)
    width = size.outputs
    kernel = n * m * (1 if trace else width * width) * torch.promote_types(size.dtype, torch.float32).itemsize
    each = OVERHEAD * size.largest  # bytes of an example for each direction
    least = 2 * (size.held + (1 if trace else 2) * each)
    if memory is None:  # more than half, where a kernel needs it and it is there
        budget = max(budget, min(free_memory(device), kernel + least))
    room = budget - kernel
    if room < least:
        got = f"{budget:,} are free" if memory is None else f"got {budget:,}"
        raise InputError(
            f"memory must be at least {kernel + least:,} bytes for this kernel of {n} x {m} examples and {width} "
            f'outputs, {got}. Give more, choose fewer outputs, reduce="trace", or use gs.ntk_operator.'
        )
    open_outputs = 1 if trace else width  # that must be held at once
    together = n if x2 is None else n + m
    if together * (size.held + open_outputs * each) <= room:
        examples, columns = max(n, m), width
    else:
        examples = room // (2 * (size.held + open_outputs * each))
        columns = width
        if examples == 0:
            examples, columns = 1, max(1, (room // 2 - size.held) // (2 * each))
        together = 2 * examples
    large = device.type == "cuda" and together * size.largest >= LARGE
    passes = 1 if trace and large else max(1, min(width, (room // together - size.held) // each)) if trace else width
    rows, cols = (_blocks(count, examples, width, columns) for count in (n, m))
    company = max(3 * examples, room // (2 * size.held))
    return Plan(n, m, width, rows, cols, chunk, signals, passes, large, company)


def check_blocks(plan: Plan, outputs: Callable[[Any], Tensor], x: Any, x2: Any) -> None:
    """Refuse where blocks of a plan would give another kernel than the batch as a whole.

    The outputs of blocks are compared with those of the batch, or of as much of it as fits, without gradients. Dropout,
    statistics of the batch, its order, and inputs that all examples share but that have as many rows as there are
    examples (which are then cut like these) show in them.
    """
    for batch, n, blocks in ((x, plan.n, plan.rows), (x2, plan.m, plan.columns)):
        ranges = list(dict.fromkeys(block.examples for block in blocks))
        if batch is not None and len(ranges) > 1:
            _check(outputs, batch, n, ranges, plan.company)


def _check(outputs: Callable[[Any], Tensor], x: Any, n: int, ranges: list[Range], company: int) -> None:
    def of(start: int, stop: int) -> Tensor:
        return outputs(slice_examples(x, n, slice(start, stop)))

    apart = torch.cat([of(*some) for some in ranges])
    for start in range(0, max(1, n - company // 2), max(1, company // 2)):
        stop = min(n, start + company)
        if not same_outputs(apart[start:stop], of(start, stop)):
            raise CoupledExamplesError(
                f"the memory allows {ranges[0][1]} of {n} examples at a time, which must give the same outputs as in "
                "one batch, but the outputs change with the company. Is the model in training mode (dropout, batch "
                "norm), or does an input that all examples share have as many rows as there are examples? Call "
                "model.eval(), give shared inputs in outputs=lambda model, x: ..., or give more memory."
            )


def check_kernel(shape: tuple[int, ...], dtype: torch.dtype, memory: Memory, device: torch.device) -> None:
    """Refuse kernels that would not fit, before anything is computed."""
    size = math.prod(shape) * dtype.itemsize
    room = free_memory(device) if memory is None else memory_budget(memory, device)
    if size > room:
        got = f"{room:,} are free" if memory is None else f"got {room:,}"
        raise InputError(
            f"memory must be at least {size:,} bytes for a kernel of shape {shape}, {got}. Give more, choose "
            'fewer outputs, reduce="trace", or use gs.ntk_operator.'
        )


def is_small(model: Any, x: Any) -> bool:
    """A forward pass of all examples may be made at once, before it is known what it takes."""
    if not isinstance(model, nn.Module):
        return False  # and others will say so
    entries = sum(t.numel() * (1 if t.is_floating_point() else ID) for t in tensors_in(x))
    return 0 < entries <= SMALL_INPUT and sum(p.numel() for p in model.parameters() if not is_lazy(p)) <= SMALL_MODEL


def _blocks(n: int, examples: int, width: int, columns: int) -> tuple[Block, ...]:
    return tuple(Block(some, part) for some in strips(n, examples) for part in strips(width, columns))


def _survey(model: nn.Module, x: Any, n: int, **options: Any) -> Survey | None:
    """Sizes from two examples; None where the model does not take a part of its batch (the capture will say why)."""
    try:
        return survey(model, slice_examples(x, n, slice(0, min(n, 2))), **options)
    except (GramscopeError, RuntimeError, ValueError, IndexError):
        return None
