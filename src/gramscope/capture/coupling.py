"""Whether examples are coupled: the outputs of one change with the others in its batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.nested import map_tensors

# Largest difference of an example's outputs in another batch, relative to the largest output: the rounding of kernels
# that are chosen by batch size. Float64 networks may round to float32 inside.
SAME = {torch.float64: 1e-5, torch.float32: 1e-3}


def same_outputs(some: Tensor, others: Tensor) -> bool:
    """The same numbers, to the rounding of kernels that are chosen by batch size."""
    gap, scale = (some - others).abs().max(), others.abs().max()
    return bool(gap <= SAME.get(others.dtype, 5e-2) * scale)


def depends_on_others(run: Callable[[Any], Float[Tensor, "n C"]], x: Any, f: Float[Tensor, "n C"]) -> bool:
    """Do the outputs of the first or of the last example change when they take the places of the others?

    A difference proves that the examples are coupled. The batch keeps its size, so that dropout masks stay the same.
    """
    n = len(f)
    if n == 2:  # each twice
        batches = [(map_tensors(partial(_filled, [example] * n), x), [example]) for example in range(n)]
    else:
        batches = [(map_tensors(partial(_filled, [0] * (n // 2) + [n - 1] * (n - n // 2)), x), [0, n - 1])]
    return any(not same_outputs(run(batch)[examples], f[examples]) for batch, examples in batches)


def _filled(examples: list[int], tensor: Tensor) -> Tensor:
    """These examples; tensors without as many rows are passed whole."""
    return tensor[examples] if tensor.dim() and len(tensor) == len(examples) else tensor
