"""Powers of two that bring numbers near one, so that their squares neither overflow nor vanish.

A solver measures its first product. Where that is of an ordinary size nothing is done; otherwise it works on
``2⁻ᵉ A``, which no rounding tells from A, and multiplies what it found by ``2ᵉ``.
"""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.linalg.algebra import Scaled
from gramscope.linalg.operator import LinearOperator

# Sizes up to 2^±ORDINARY leave room for squares, sums and the relative residuals of either; a factor beyond
# 2^±GREATEST is no normal number of the dtype itself.
ORDINARY = {torch.float32: 32, torch.float64: 200}
GREATEST = {torch.float32: 120, torch.float64: 1000}


def excess(x: Tensor) -> int:
    """The power of two to divide by, 0 where the greatest entry is of an ordinary size (or zero, or not finite)."""
    peak = float(torch.linalg.vector_norm(x, float("inf"))) if x.numel() else 0.0
    exponent = math.frexp(peak)[1] if math.isfinite(peak) else 0
    if abs(exponent) <= ORDINARY[x.dtype]:
        return 0
    return max(-GREATEST[x.dtype], min(GREATEST[x.dtype], exponent))


def column_scales(x: Float[Tensor, "n k"]) -> Float64[Tensor, " k"]:
    """``2ᵉ`` with the :func:`excess` e of each column."""
    if not x.numel():
        return torch.ones(x.shape[1], dtype=torch.float64, device=x.device)
    exponents = torch.frexp(torch.linalg.vector_norm(x, float("inf"), dim=0).double()).exponent
    exponents = exponents.clamp(-GREATEST[x.dtype], GREATEST[x.dtype])
    return torch.where(exponents.abs() <= ORDINARY[x.dtype], 1.0, 2.0 ** exponents.double())


def near_one(op: LinearOperator, image: Float[Tensor, "n k"]) -> tuple[LinearOperator, Float[Tensor, "n k"], float]:
    """``2⁻ᵉ A``, ``2⁻ᵉ A X`` and ``2ᵉ`` for a product ``A X`` with its :func:`excess` e; for e = 0 what was given."""
    exponent = excess(image)
    if exponent == 0:
        return op, image, 1.0
    return Scaled(2.0**-exponent, op), image * 2.0**-exponent, 2.0**exponent
