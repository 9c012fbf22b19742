"""Checks of tensors and numbers that come from a user."""

from collections.abc import Iterable

import torch
from torch import Tensor

from gramscope.base.errors import InputError, UnsupportedError


def check_plain(tensor: Tensor, what: str, complex_numbers: bool = False) -> None:
    """Raise unless ``tensor`` is dense, on a real device, not quantised and, unless allowed, real."""
    if tensor.is_meta:
        raise UnsupportedError(
            f"{what} must hold values, but it is on the meta device. Materialise the model "
            "(model.to_empty(device=...) and load its weights) before measuring it."
        )
    if tensor.is_complex() and not complex_numbers:
        raise UnsupportedError(
            f"{what} must be real, but it has dtype {tensor.dtype}. Pass its real and imaginary parts "
            "(torch.view_as_real), or its absolute values."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UnsupportedError(
            f"{what} must be a dense tensor, but it has layout {tensor.layout}. Call .to_dense() "
            "(or pad the nested tensor) first."
        )
    if tensor.is_quantized:
        raise UnsupportedError(
            f"{what} must be a floating tensor, but it is quantised ({tensor.dtype}). Measure the "
            "floating-point model before quantisation, or call .dequantize()."
        )


def check_one_device(named: Iterable[tuple[str, Tensor]], reference: torch.device, what: str) -> None:
    """Raise unless all tensors lie on the device ``reference`` of ``what``."""
    for name, tensor in named:
        if tensor.device != reference:
            raise InputError(
                f"{name} must be on the device of {what} ({reference}), but it is on {tensor.device}. "
                f"Move one of them, e.g. x.to({str(reference)!r})."
            )


def check_finite(tensor: Tensor, what: str, remedy: str) -> None:
    """Raise if ``tensor`` has a NaN or an infinity."""
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise InputError(f"{what} must be finite, but {bad} of {tensor.numel()} entries are not. {remedy}")
