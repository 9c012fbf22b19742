"""The arithmetic that gramscope computes in, whatever the user has switched on, and the user's own for his model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")
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
