"""Fresh memory: of the shape asked for, and from the start of a cache line whatever the allocator gives."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from gramscope.base.pages import fresh_empty, fresh_zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (1000, 1001), (3, 0, 2)])
def test_memory_begins_with_a_cache_line(shape, dtype):
    held = [fresh_empty(shape, dtype, CPU) for _ in range(8)]  # several at once, at addresses of their own
    for tensor in held:
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_zeros_are_zero_and_their_storage_is_their_own_size():
    zeros = fresh_zeros((50, 40), torch.float32, CPU)
    assert not zeros.any()
    assert zeros.untyped_storage().nbytes() == 50 * 40 * 4


def test_other_dtypes_are_left_to_torch():
    assert fresh_zeros((2, 3), torch.bfloat16, CPU).dtype == torch.bfloat16


# Frees four blocks of 30 MiB, more than glibc keeps by itself, and prints how many of them stay in the process.
KEPT = """
import os, torch
from pathlib import Path
from gramscope.base.pages import keep_freed_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {ask}:
    keep_freed_blocks()
before = resident()
held = [torch.ones(30 * 2**18) for _ in range(4)]
del held
print(round((resident() - before) / (30 * 2**20)))
"""


def blocks_kept(ask, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", KEPT.format(ask=ask)]
    return int(subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is asked to keep memory")
def test_freed_memory_stays_in_the_process_when_asked_for():
    assert blocks_kept(False) == 0
    assert blocks_kept(True) == 4
    # Thresholds of the user's own are left as they are.
    assert blocks_kept(True, MALLOC_MMAP_THRESHOLD_="131072") == 0
