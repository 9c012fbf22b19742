"""How to cut a kernel into blocks that stay within a memory budget."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gramscope.base.errors import GramscopeError, InputError
from gramscope.base.memory import Memory, free_memory, memory_budget
from gramscope.base.nested import tensors_in
from gramscope.capture.capture import Survey, survey
from gramscope.capture.network import Outputs, count_examples, slice_examples
from gramscope.capture.precision import Precision
from gramscope.kernels.pieces import Range, strips

# A capture holds raw signals and the copies its contraction works on. A safe factor, not a measured one: the tests
# check that live bytes stay within the budget.
OVERHEAD = 4
# Bytes of the largest signal captured at a time on a CPU: from 12 to 32 MiB did equally well there.
PART = 2**24
# Bytes of gradient rows held at a time: enough that their products are large, or fill the GPU.
CHUNK = {"cpu": 2**26, "cuda": 2**31}
# Inputs and models whose forward pass will fit: entries of x, so many for each id (it stands for a vector), parameters.
SMALL_INPUT, ID, SMALL_MODEL = 2**18, 64, 10**7


@dataclass(frozen=True)
class Block:
    """Some examples and some outputs."""

    examples: Range
    outputs: Range


@dataclass(frozen=True)
class Plan:
    """Blocks of the rows and of the columns of a kernel, and the bytes of gradient rows to hold at once.

    ``part`` is the number of examples to capture at a time, where that is better than a whole block, ``company`` that
    for which a forward pass alone fits.
    """

    n: int
    m: int
    outputs: int
    rows: tuple[Block, ...]
    columns: tuple[Block, ...]
    chunk: int
    part: int | None = None
    company: int = 0

    @property
    def one_by_one(self) -> bool:
        """Every block holds a single example, although there are several."""
        return self.n > 1 and all(stop - start == 1 for start, stop in (block.examples for block in self.rows))

    def with_outputs(self, outputs: int) -> "Plan":
        """The same, once the number of outputs is known (-1 until then, and then not cut)."""
        if self.outputs >= 0:
            return self
        whole = Block((0, self.n), (0, outputs)), Block((0, self.m), (0, outputs))
        return replace(self, outputs=outputs, rows=whole[:1], columns=whole[1:])


def make_plan(
    model: nn.Module, x: Any, x2: Any, *, trace: bool, blocked: bool, memory: Memory, outputs: Outputs,
    frozen: bool, precision: Precision, size: Survey | None = None,
) -> Plan:  # fmt: skip
    """Blocks such that captures, copies and the kernel itself fit into ``memory`` bytes; ``size`` if it is known."""
    n = count_examples(x)
    m = n if x2 is None else count_examples(x2)
    device = tensors_in(x)[0].device
    budget = memory_budget(memory, device)
    chunk = min(budget // 8, CHUNK.get(device.type, CHUNK["cuda"]))
    if size is None and blocked:
        size = _survey(model, x, n, outputs=outputs, frozen=frozen, precision=precision)
    if size is None:
        return Plan(n, m, -1, (Block((0, n), (0, -1)),), (Block((0, m), (0, -1)),), chunk)
    width = size.outputs
    item = torch.promote_types(size.dtype, torch.float32).itemsize
    kernel = n * m * (1 if trace else width * width) * item
    each = OVERHEAD * max(1, size.entries) * item
    if memory is None:  # more than half, where a kernel needs it and it is there
        budget = max(budget, min(free_memory(device), kernel + 2 * each))
    room = budget - kernel
    if room < 2 * each:
        got = f"{budget:,} are free" if memory is None else f"got {budget:,}"
        raise InputError(
            f"memory must be at least {kernel + 2 * each:,} bytes for this kernel of {n} x {m} examples and {width} "
            f'outputs, {got}. Give more, choose fewer outputs, reduce="trace", or use gs.ntk_operator.'
        )
    if n * width * each <= room and (x2 is None or (n + m) * width * each <= room):
        examples, columns = max(n, m), width
    else:
        fit = max(1, room // (2 * each))
        examples, columns = max(1, fit // width), min(width, fit)
    part = None
    if size.crowded and tensors_in(x)[0].device.type == "cpu":
        part = max(2, PART // (max(1, size.largest) * (width + 1) * item))
    rows, cols = (_blocks(count, examples, width, columns) for count in (n, m))
    return Plan(n, m, width, rows, cols, chunk, part, company=max(3 * examples, room // (2 * each)))


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
