"""Fresh memory for large tensors.

A new page costs the CPU more than the arithmetic on it. numpy asks the system for huge pages where torch does not: 105
MB come in 7 ms instead of 24. But numpy begins wherever the C library does, and a matrix product into memory 48 bytes
past the start of a cache line took 82 ms instead of 57. And the C library returns freed blocks to the system, unless it
has learnt to keep them.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 64  # bytes of a cache line, where torch's own memory begins


def fresh_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that holds nothing yet; on the CPU in huge pages, from the start of a cache line."""
    if device.type == "cpu" and dtype in _NUMPY:
        size = math.prod(shape)
        longer = np.empty(size + _LINE // dtype.itemsize, _NUMPY[dtype])
        start = -longer.ctypes.data % _LINE // dtype.itemsize
        return torch.from_numpy(longer[start : start + size].reshape(shape))
    return torch.empty(shape, dtype=dtype, device=device)


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, written at once, before the cache is in use."""
    return fresh_empty(shape, dtype, device).zero_()


@cache
def keep_freed_blocks() -> None:
    """Let glibc keep blocks up to 32 MiB on its heap, for the next tensor to use.

    It learns the size from the largest block that it was ever given back (mallopt(3), M_MMAP_THRESHOLD). One of these,
    never touched, teaches it at once what some steps of training would have taught it. Nothing happens elsewhere.
    """
    torch.empty(2**25 - 2**13, dtype=torch.uint8)
