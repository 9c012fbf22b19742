"""Where the channels of images lie in memory: before the positions (planar, as torch has them), or last."""

import torch
from torch import Tensor

# From so many channels on a planar convolution is as fast as one with channels last, and products want planes.
THICK = 32
FAST = {torch.float32}  # what the library of CPU convolutions has


def channels_last(images: Tensor) -> bool:
    """``images`` (..., channels, height, width) lie in memory as (..., height, width, channels)."""
    return images.dim() >= 4 and not images.is_contiguous() and images.movedim(-3, -1).is_contiguous()


def like(factor: Tensor, images: Tensor) -> Tensor:
    """``factor``, broadcast against ``images``, in the same order of memory: two orders in one pass are slow."""
    return factor.movedim(-3, -1).contiguous().movedim(-1, -3) if channels_last(images) else factor


def for_convolution(images: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Signals in the order in which a CPU takes them back through a convolution with these steps.

    Up to twice as fast with channels last where the steps are larger than one, which pays for the copy.
    """
    better = images.device.type == "cpu" and images.dtype in FAST and len(stride) == 2 and max(stride) > 1
    return images.contiguous(memory_format=torch.channels_last) if better else images


def after_convolution(images: Tensor) -> Tensor:
    """The result: few channels may stay last, where the next convolution gains by it as well."""
    return images.contiguous() if channels_last(images) and images.shape[-3] >= THICK else images
