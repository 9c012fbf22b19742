"""Fresh memory: of the shape asked for, and from the start of a cache line whatever the allocator gives."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gramscope.base import pages
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


@pytest.fixture
def may_keep(monkeypatch):
    """No blocks from other tests, and an environment that leaves freed memory to us."""
    monkeypatch.setattr(pages, "_may_keep", lambda: True)
    monkeypatch.setattr(pages, "_freed", {})


LARGE = 10 * 2**20, 2  # 80 MiB in float32


def test_a_large_block_serves_the_next_tensor_once_its_own_is_gone(may_keep):
    first = fresh_empty(LARGE, torch.float32, CPU).fill_(7.0)
    place, row = first.data_ptr(), first[3]
    del first
    second = fresh_zeros(LARGE, torch.float32, CPU)
    assert second.data_ptr() != place  # a view of the first is still in use
    assert row.tolist() == [7.0, 7.0]
    del row
    third = fresh_zeros((LARGE[0], 1), torch.float64, CPU)
    assert third.data_ptr() // 4096 == place // 4096
    assert not third.any()
    assert third.untyped_storage().nbytes() == 80 * 2**20


def test_little_is_kept_and_for_like_sizes_only(may_keep):
    held = [fresh_empty(LARGE, torch.float32, CPU) for _ in range(3)]
    del held
    assert [block.nbytes // 2**20 for block in pages._freed.values()] == [80]  # 128 MiB in all
    small, large = fresh_empty((9 * 2**20,), torch.float32, CPU), fresh_empty((LARGE[0], 3), torch.float32, CPU)
    assert len(pages._freed) == 1  # 36 MiB would waste more than half of it, 120 MiB do not fit
    del small, large
    pages.release_blocks()
    assert not pages._freed


def test_nothing_is_kept_where_the_environment_decides(may_keep, monkeypatch):
    monkeypatch.setattr(pages, "_may_keep", lambda: False)
    fresh_empty(LARGE, torch.float32, CPU)
    assert not pages._freed


def test_blocks_in_many_threads_are_never_shared(may_keep):
    """Each thread writes its own number all over its block, and finds nothing else there."""

    def fills(number):
        found = []
        for _ in range(3):
            mine = fresh_empty((9 * 2**20,), torch.float32, CPU).fill_(number)
            found.append(bool((mine == number).all()))
        return all(found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fills, range(8)))
