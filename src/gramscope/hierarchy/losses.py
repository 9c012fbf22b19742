"""The losses that are known by name: the same for ``explain_step`` and for ``watch``."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from gramscope.base.errors import InputError

Targets: TypeAlias = Any  # what the user's own loss takes
Loss = Callable[[Tensor, Targets], Tensor]


def loss_function(loss: object) -> Loss:
    """A loss by its name, or a function (outputs, y) -> number as it is."""
    if callable(loss):
        return loss
    known: dict[str, Loss] = {"mse": _mse, "half_squared": _half_squared, "cross_entropy": _cross_entropy}
    if not isinstance(loss, str) or loss not in known:
        raise InputError(f"loss must be one of {', '.join(known)}, or a function (output, y) -> number, got {loss!r}.")
    return known[loss]


def _mse(f: Tensor, y: Targets) -> Tensor:
    return F.mse_loss(f, _like(f, y))


def _half_squared(f: Tensor, y: Targets) -> Tensor:
    return 0.5 * (f - _like(f, y)).square().sum()


def _cross_entropy(f: Tensor, y: Targets) -> Tensor:
    if not isinstance(y, Tensor):
        raise InputError(
            f"y must be a tensor of class labels, or of class probabilities, for the cross entropy, got "
            f"{type(y).__name__}. Call torch.as_tensor(y)."
        )
    if y.is_floating_point():
        return _checked_cross_entropy(f, y.to(f.dtype))
    # torch has the classes on axis 1; sequence models have them last.
    last, first = y.shape == f.shape[:-1], y.shape == (f.shape[0], *f.shape[2:])
    if f.dim() > 2 and last and first:
        raise InputError(
            f"it must be clear which axis of the outputs holds the classes, got outputs of shape {tuple(f.shape)} and "
            f"y of {tuple(y.shape)}. Pass loss=lambda f, y: F.cross_entropy(f.movedim(-1, 1), y) if it is the last, "
            "loss=F.cross_entropy if it is the second."
        )
    return _checked_cross_entropy(f.movedim(-1, 1) if f.dim() > 2 and last else f, y)


def _checked_cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    try:
        return F.cross_entropy(f, y if y.is_floating_point() else y.long())
    except (RuntimeError, ValueError, IndexError) as error:
        raise InputError(
            "y must hold one class for each row of the output, or one probability for each of its entries, for the "
            f"cross entropy, got {y.dtype} of shape {tuple(y.shape)} for outputs of shape {tuple(f.shape)}. torch "
            f"said: {error}"
        ) from error


def _like(f: Tensor, y: Targets) -> Tensor:
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.shape != f.shape:
        got = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise InputError(
            f"y must be a floating tensor of the output's shape {tuple(f.shape)} for a squared error, got {got}. For "
            'class labels pass loss="cross_entropy", or y as one-hot rows.'
        )
    return y.to(f.dtype)
