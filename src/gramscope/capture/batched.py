"""Many backward passes through one graph at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def batched_gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Tensor], together: bool = True
) -> list[Tensor | None]:
    """``Jᵀ c`` for k cotangents, (k, *output shape) for each output: (k, *input shape) for each input.

    Outputs and inputs are tensors or gradient edges; None where the outputs do not depend on an input. All k run in one
    traversal of the graph if ``together`` and where torch can batch its operations, else one after the other, with the
    same numbers. The graph is kept.
    """
    count = len(cotangents[0])
    with torch.enable_grad():
        if count > 1 and together:
            try:
                found = torch.autograd.grad(
                    outputs, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
                return [None if gradient is None else dense(gradient) for gradient in found]
            except (RuntimeError, ValueError) as error:  # an operation without a batching rule
                if is_out_of_memory(error):
                    raise
        columns: list[Tensor | None] = [None] * len(inputs)
        missing: set[tuple[int, int]] = set()
        for place in range(count):
            some = [c[place] for c in cotangents]
            found = torch.autograd.grad(outputs, inputs, some, retain_graph=True, allow_unused=True)
            for column, gradient in enumerate(found):
                if gradient is None:
                    missing.add((column, place))
                else:
                    columns[column] = _put(columns[column], dense(gradient.detach()), place, count)
    for column, place in missing:
        if (held := columns[column]) is not None:
            held[place] = 0
    return columns


def _put(column: Tensor | None, gradient: Tensor, place: int, count: int) -> Tensor:
    """One of ``count`` gradients, where all of them are to lie: in memory, those of one example side by side."""
    if count == 1:
        return gradient[None]
    if column is None and gradient.dim():
        inner = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)  # as each of them lies in memory
        laid = gradient.new_empty(gradient.shape[0], count, *(gradient.shape[axis] for axis in inner))
        column = laid.permute(1, 0, *(2 + inner.index(axis) for axis in range(1, gradient.dim())))
    elif column is None:
        column = gradient.new_empty(count)
    column[place] = gradient
    return column


def dense(gradient: Tensor) -> Tensor:
    """Embeddings may give sparse gradients."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for this on a GPU, and only words for it on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
