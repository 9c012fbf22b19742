"""In which dtype a network is measured: its own, or that of a private copy."""

from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from gramscope.base.complex_numbers import with_precision_of
from gramscope.base.errors import InputError
from gramscope.capture.network import in_dtype, prepare_input, unwrap_with_input

Precision = Literal["float64", "float32", "tf32"] | None
_COPIES = {"float64": torch.float64, "float32": torch.float32}


def check_precision(precision: str | None) -> None:
    if precision not in (None, "float64", "float32", "tf32"):
        raise InputError(f'precision must be None, "float64", "float32" or "tf32", got {precision!r}.')


def at_precision(model: nn.Module, x: Any, precision: Precision) -> tuple[nn.Module, Any]:
    """The model without its wrappers and x as fresh tensors, in the dtype asked for: copies, where that is another."""
    model, x = unwrap_with_input(model, x)
    dtype = _COPIES.get(precision or "")
    tensors = chain(model.parameters(), model.buffers())
    if dtype is not None and any(with_precision_of(t, dtype).dtype != t.dtype for t in tensors):
        model = in_dtype(model, dtype)
    return model, prepare_input(x, dtype)
