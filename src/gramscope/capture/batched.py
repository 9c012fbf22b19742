"""Many backward passes through one graph at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def batched_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Any], cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """``Jᵀ c`` for k cotangents, (k, *output shape) for each output: (k, *input shape) for each input.

    Inputs are tensors or gradient edges; None where the outputs do not depend on one. All k run in one traversal of the
    graph where torch can batch its operations, else one after the other, with the same numbers. The graph is kept.
    """
    count = len(cotangents[0])
    with torch.enable_grad():
        if count > 1:
            try:
                found = torch.autograd.grad(
                    outputs, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
                return [None if gradient is None else dense(gradient) for gradient in found]
            except (RuntimeError, ValueError) as error:  # an operation without a batching rule
                if is_out_of_memory(error):
                    raise
        each = [
            torch.autograd.grad(outputs, inputs, [c[k] for c in cotangents], retain_graph=True, allow_unused=True)
            for k in range(count)
        ]
    columns: list[Tensor | None] = []
    for column in zip(*each, strict=True):
        present = [dense(gradient) for gradient in column if gradient is not None]
        columns.append(torch.stack(present) if present else None)
    return columns


def dense(gradient: Tensor) -> Tensor:
    """Embeddings may give sparse gradients."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for this on a GPU, and only words for it on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


def batched_gradients_or_zeros(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """The same, with zeros for inputs on which the outputs do not depend."""
    found = batched_gradients(outputs, inputs, cotangents)
    count = len(cotangents[0])
    return [i.new_zeros(count, *i.shape) if g is None else g for g, i in zip(found, inputs, strict=True)]
