"""What each position of a convolution's kernel sees."""

import math

import torch.nn.functional as F
from torch import Tensor


def patches(
    image: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...], groups: int, places: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """(B, channels, *image) -> (B, T, g, channels/g · kernel): what each of T = Π ``places`` kernel positions sees."""
    # Positions that reach past the far edge (an output padding, a stride that does not divide) see zeros.
    spans = [(p - 1) * s + (k - 1) * d + 1 for p, s, k, d in zip(places, stride, kernel, dilation, strict=True)]
    far = [max(hi, span - size - lo) for size, span, (lo, hi) in zip(image.shape[2:], spans, padding, strict=True)]
    flat = [edge for (low, _), high in reversed(list(zip(padding, far, strict=True))) for edge in (low, high)]
    padded = F.pad(image, flat) if any(flat) else image
    base = padded.stride()
    windows = padded.as_strided(
        (*padded.shape[:2], *places, *kernel),
        (*base[:2], *(b * s for b, s in zip(base[2:], stride, strict=True)),
         *(b * d for b, d in zip(base[2:], dilation, strict=True))),
        padded.storage_offset(),
    )  # fmt: skip
    # Gathered with the positions innermost, where memory runs on, and seen with the entries innermost.
    spatial = len(kernel)
    grouped = windows.unflatten(1, (groups, -1))  # (B, g, c, *places, *kernel)
    order = (0, 1, 2, *range(3 + spatial, 3 + 2 * spatial), *range(3, 3 + spatial))
    gathered = grouped.permute(order).reshape(len(image), groups, -1, math.prod(places))
    return gathered.permute(0, 3, 1, 2)
