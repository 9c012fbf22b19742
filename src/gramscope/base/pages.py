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
import weakref
from functools import cache

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 64  # bytes of a cache line, where torch's own memory begins
# Parameters of glibc's mallopt. Blocks up to 32 MiB, the most it takes, lie on the heap; so much free memory may stay.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ON_THE_HEAP, _KEPT, _KEPT_LARGE = 2**25, 2**28, 2**27


def fresh_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that holds nothing yet; on the CPU in huge pages, from the start of a cache line."""
    if device.type == "cpu" and dtype in _NUMPY:
        size = math.prod(shape) * dtype.itemsize
        block = _large_block(size + _LINE) if size > _ON_THE_HEAP else np.empty(size + _LINE, np.uint8)
        start = -block.ctypes.data % _LINE
        array = block[start : start + size].view(_NUMPY[dtype]).reshape(shape)
        if size > _ON_THE_HEAP:
            weakref.finalize(array, _give_back, block).atexit = False
        return torch.from_numpy(array)
    return torch.empty(shape, dtype=dtype, device=device)


# Large blocks, which the C library returns to the system at once: those of tensors that are gone serve the next ones.
# By identity, and taken out in one operation: other threads and the garbage collector may come between any two.
_freed: dict[int, np.ndarray] = {}


def _large_block(size: int) -> np.ndarray:
    for key, block in list(_freed.items()):
        if size <= block.nbytes <= 2 * size and _freed.pop(key, None) is not None:
            return block
    return np.empty(size, np.uint8)


def _give_back(block: np.ndarray) -> None:
    """The last tensor that lay in ``block`` is gone; the latest blocks are kept, up to 128 MiB."""
    if _may_keep():
        _freed[id(block)] = block
        while sum(kept.nbytes for kept in list(_freed.values())) > _KEPT_LARGE:
            _freed.pop(next(iter(list(_freed))), None)


def release_blocks() -> None:
    """Return large blocks that are kept for the next tensor to the system."""
    _freed.clear()


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, written at once, before the cache is in use."""
    return fresh_empty(shape, dtype, device).zero_()


@cache
def _may_keep() -> bool:
    """The environment says nothing of its own about memory that is freed."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    return not chosen and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "")


@cache
def keep_freed_blocks() -> None:
    """Let glibc keep freed memory, up to 256 MiB of it, for the next tensor to use.

    As it comes, glibc hands the top of its heap back once 64 MiB there are free, and every call takes the same pages
    anew: a quarter of a short one. Thresholds that the environment sets (mallopt(3), GLIBC_TUNABLES) are left as they
    are, and so is every other C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and _may_keep() else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _ON_THE_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
