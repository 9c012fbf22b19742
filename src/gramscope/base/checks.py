"""Checks of tensors and numbers that come from a user."""

import cmath
import math
import operator
import sys
from collections.abc import Iterable
from numbers import Real
from typing import SupportsFloat, SupportsIndex, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramscope.base.errors import InputError, UnsupportedError


def loaded(module: str, name: str) -> type | tuple[()]:
    """A class for ``isinstance``; of a module that nobody has imported nothing can be one, and importing is slow."""
    return getattr(sys.modules.get(module), name, ())


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes."""
    return isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


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


def check_tensor(x: object, what: str) -> Tensor:
    """``x``, once it is known to be a plain tensor (:func:`check_plain`)."""
    if not isinstance(x, Tensor):
        raise InputError(f"{what} must be a torch.Tensor, got {type(x).__name__}. Convert it: torch.as_tensor(...).")
    check_plain(x, what)
    return x


def shape_or_type(x: object) -> tuple[int, ...] | str:
    """What was got, for a message: the shape of a tensor, the class of anything else."""
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__


def check_one_device(named: Iterable[tuple[str, Tensor]], reference: torch.device, what: str) -> None:
    """Raise unless all tensors lie on the device ``reference`` of ``what``."""
    for name, tensor in named:
        if tensor.device != reference:
            raise InputError(
                f"{name} must be on the device of {what} ({reference}), but it is on {tensor.device}. "
                f"Move one of them, e.g. x.to({str(reference)!r})."
            )


def check_finite(values: Tensor | NDArray[np.floating], what: str, remedy: str) -> None:
    """Raise if a tensor or an array has a NaN or an infinity."""
    if not cmath.isfinite(values.sum().item()):  # perhaps as a sum of finite numbers: then each is looked at
        finite = torch.isfinite(values) if isinstance(values, Tensor) else np.isfinite(values)
        bad = int((~finite).sum())
        if bad:
            raise InputError(f"{what} must be finite, but {bad} of {math.prod(finite.shape)} entries are not. {remedy}")


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whether ``value`` is one real number: Python's or numpy's, or a tensor of one entry. Booleans are none."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[SupportsIndex]:
    """Whether ``value`` is a whole number that can count something. Booleans are none."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]  # asks whether it is one
    except TypeError:
        return False
    return True


def check_number(
    value: object, name: str, *, above: float | None = None, least: float = -math.inf, below: float = math.inf,
    hint: str = "",
) -> float:  # fmt: skip
    """``value`` as a float; raise unless it is one finite number > ``above``, >= ``least`` and < ``below``.

    >>> check_number(0.1, "lr", above=0.0)
    0.1
    """
    number = float(value) if is_number(value) else math.nan
    if math.isfinite(number) and (above is None or number > above) and least <= number < below:
        return number
    bounds = [f"greater than {above:g}"] if above is not None else []
    bounds += [f"at least {least:g}"] if least > -math.inf else []
    bounds += [f"less than {below:g}"] if below < math.inf else []
    wanted = f" {' and '.join(bounds)}" if bounds else ""
    raise InputError(f"{name} must be one finite number{wanted}, got {value!r}.{' ' + hint if hint else ''}")


def check_lr(lr: object) -> float:
    """The learning rate of a step, by one rule in every call: finite, and at least 0 (where a warm-up begins).

    >>> check_lr(0)
    0.0
    """
    return check_number(lr, "lr", least=0.0, hint="To climb, turn the sign of the loss (or of the residual).")


def check_count(value: object, name: str, least: int = 1, most: int | None = None, why: str = "") -> int:
    """``value`` as an int; raise unless it is a whole number from ``least`` to ``most``.

    >>> check_count(3, "k", most=4)
    3
    """
    if is_whole(value) and (count := operator.index(value)) >= least and (most is None or count <= most):
        return int(count)
    reach = f"of at least {least}" if most is None else f"from {least} to {most}{', ' + why if why else ''}"
    raise InputError(f"{name} must be a whole number {reach}, got {value!r}.")


def check_counts(least: int, **values: object) -> None:
    """Raise unless every value is a whole number of at least ``least``; their names are those of the arguments."""
    for name, value in values.items():
        check_count(value, name, least)


def check_choice(value: object, name: str, allowed: Iterable[object]) -> None:
    """Raise unless ``value`` is one of a few.

    >>> check_choice("largest", "end", ("largest", "smallest"))
    """
    known = tuple(allowed)
    if value not in known:
        raise InputError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def check_symmetric(matrix: Tensor | NDArray[np.floating], what: str, tol: float, remedy: str) -> None:
    """Raise unless a matrix (..., d, d) is square, finite and symmetric, up to ``tol`` of its largest entry."""
    given = matrix if isinstance(matrix, Tensor) else torch.as_tensor(matrix, device="cpu")
    if given.ndim < 2 or given.shape[-1] != given.shape[-2] or given.numel() == 0:
        raise InputError(f"{what} must be a square matrix (d, d) with d > 0, got shape {tuple(given.shape)}.")
    check_finite(given, what, "Look at the numbers that it was made of, or at the step where training diverged.")
    scale, gap = float(given.abs().max()), float((given - given.mT).abs().max())
    if gap > tol * scale:
        raise InputError(
            f"{what} must be symmetric, but it differs from its transpose by {gap:.3g} (largest entry {scale:.3g}). "
            f"{remedy}"
        )
