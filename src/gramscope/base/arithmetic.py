"""The arithmetic that gramscope computes in, whatever the user has switched on, and the user's own for his model.

And products of float32 matrices on a CPU, by the faster of the two libraries that torch brings.
"""

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

_DEVICES = ("cpu", "cuda", "mps", "xpu")
# Multiply-adds from which a call of oneDNN is worth its overhead. Measured on a Zen 5 core: 80 x 80 x 96 takes 16 µs
# in place of 13, 80 x 80 x 1,024 takes 85 in place of 119, 640 x 640 x 8,192 takes 28 ms in place of 58.
WORTH = 2**22
# The autocast that was in force where gramscope was called: device type -> dtype.
_USERS: ContextVar["Autocast"] = ContextVar("users_autocast", default={})  # noqa: B039 (never written to)


Autocast = dict[str, torch.dtype]


def autocast_in_force() -> Autocast:
    """Device types for which autocast is on now, or was where gramscope was called, with its dtype."""
    now = {device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)}
    return now or _USERS.get()


@contextmanager
def exact_arithmetic(tf32: bool = False, users: Autocast | None = None) -> Iterator[None]:
    """Float32 means float32: TF32 (and bfloat16 on the CPU) only where it was asked for, and no autocast.

    The model's own forward pass keeps the user's autocast (``users_autocast``): that of now, or ``users``.
    """
    with ExitStack() as stack:
        _switch_matmul("high" if tf32 else "highest", stack)
        if torch.cuda.is_available() and torch.backends.cudnn.allow_tf32 != tf32:
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", not tf32)
            torch.backends.cudnn.allow_tf32 = tf32
        stack.callback(_USERS.reset, _USERS.set(autocast_in_force() if users is None else users))
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def users_autocast() -> Iterator[None]:
    """Around the model's own code, inside ``exact_arithmetic``: autocast as it was in force outside.

    Its cache of cast weights is neither read nor filled: a loop that stands in one autocast trains on what is in it.
    """
    with ExitStack() as stack:
        for device, dtype in _USERS.get().items():
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        yield


def _switch_matmul(wanted: str, stack: ExitStack) -> None:
    """torch keeps two interfaces to one setting and refuses to read what the other has written."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul: Any = torch.backends.cuda.matmul
        stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
        matmul.fp32_precision = "tf32" if wanted == "high" else "ieee"
        return
    if before != wanted:
        stack.callback(torch.set_float32_matmul_precision, before)
        torch.set_float32_matmul_precision(wanted)


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
