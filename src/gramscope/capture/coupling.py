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
    """Do the outputs of the first or of the last example change when it takes the places of all the others?

    A difference proves that the examples are coupled. The batch keeps its size, so that dropout masks stay the same.
    """
    n = len(f)
    for example in (0, n - 1):
        batch = map_tensors(partial(_filled_with, n, example), x)
        if not same_outputs(run(batch)[example], f[example]):
            return True
    return False


def _filled_with(n: int, example: int, tensor: Tensor) -> Tensor:
    """One example n times; tensors without n rows are passed whole."""
    rows = tensor.dim() and len(tensor) == n
    return tensor[example : example + 1].expand_as(tensor).clone() if rows else tensor
