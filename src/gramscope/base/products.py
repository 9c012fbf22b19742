"""Products of float32 matrices on a CPU, by the faster of the two libraries that torch brings."""

import platform
from functools import cache
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

# Multiply-adds from which a call of oneDNN is worth its overhead. Measured on a Zen 5 core: 80 x 80 x 96 takes 16 µs
# in place of 13, 80 x 80 x 1,024 takes 85 in place of 119, 640 x 640 x 8,192 takes 28 ms in place of 58.
WORTH = 2**22


def product_with_transpose(left: Float[Tensor, "r p"], right: Float[Tensor, "q p"]) -> Float[Tensor, "r q"]:
    """``left rightᵀ``.

    MKL, which multiplies matrices for torch, keeps its AVX-512 code for Intel's processors; oneDNN, which computes
    torch's convolutions, has it for all. It sums in float32 too, and cuts long sums by itself.
    """
    if left.dtype == right.dtype and onednn_pays(left, len(left) * right.numel()):
        # Strided matrices would be multiplied by a reference loop there.
        one, other = left.contiguous(), right.contiguous()
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(one, other, None, "none", [], ""))
    return left @ right.T


def onednn_pays(like: Tensor, multiply_adds: int) -> bool:
    """Whether oneDNN multiplies matrices such as this one in less time than MKL."""
    return like.is_cpu and like.dtype == torch.float32 and multiply_adds >= WORTH and _onednn_is_faster()


@cache
def _onednn_is_faster() -> bool:
    """On processors with AVX-512 that are not Intel's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    if platform.machine() != "x86_64" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "AuthenticAMD" in processor.read_text()
