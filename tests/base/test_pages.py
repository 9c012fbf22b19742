"""Fresh memory: of the shape asked for, and from the start of a cache line whatever the allocator gives."""

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
