"""Whether a batch may be cut into blocks: an example must give the same outputs in other company."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gramscope.base.errors import CoupledExamplesError
from gramscope.capture.coupling import same_outputs
from gramscope.capture.network import slice_examples
from gramscope.kernels.memory import Plan
from gramscope.kernels.pieces import Range


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
