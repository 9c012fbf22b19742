"""Fresh memory for large tensors.

A new page costs the CPU more than the arithmetic on it. numpy asks the system for huge pages where torch does not: 105
MB come in 7 ms instead of 24. But numpy begins wherever the C library does, and a matrix product into memory 48 bytes
past the start of a cache line took 82 ms instead of 57. And the C library returns freed blocks to the system, unless it
is asked to keep them.
"""

import ctypes
import math
import os
import sys
from functools import cache

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 64  # bytes of a cache line, where torch's own memory begins
# Parameters of glibc's mallopt. Blocks up to 32 MiB, the most it takes, lie on the heap; so much free memory may stay.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ON_THE_HEAP, _KEPT = 2**25, 2**28


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
    """Let glibc keep freed memory, up to 256 MiB of it, for the next tensor to use.

    As it comes, glibc hands the top of its heap back once 64 MiB there are free, and every call takes the same pages
    anew: a quarter of a short one. Thresholds that the environment sets (mallopt(3), GLIBC_TUNABLES) are left as they
    are, and so is every other C library.
    """
    environment = os.environ
    chosen = any(name.startswith("MALLOC_") for name in environment)
    if sys.platform != "linux" or chosen or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _ON_THE_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
