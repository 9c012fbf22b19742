"""Kernel gradient flow at a finite time, in closed form."""

import torch
from jaxtyping import Float64
from torch import Tensor


def flow_weights(
    matrix: Float64[Tensor, "rows rows"],
    targets: Float64[Tensor, "rows columns"],
    times: Float64[Tensor, " times"],
    floor: float,
) -> Float64[Tensor, "times rows columns"]:
    """``a_t = g_t(K) y`` with ``g_t(λ) = (1 − e^{−λ t}) / λ``: the coefficients of kernel gradient flow at time t.

    ``f_t = K_* a_t`` solves ``∂_t f = −K (f − y)`` from 0. ``g_t(0) = t``, and ``g_∞ = 1/λ``, zero for eigenvalues up
    to ``floor``, which are rounding. Lee et al. 2019 (arXiv:1902.06720), eq. 8 to 10.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> [round(float(a), 4) for a in flow_weights(one, one, torch.tensor([0.0, 1.0, torch.inf]).double(), 0.0)]
    [0.0, 0.6321, 1.0]
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values.abs() > floor
    safe = torch.where(kept, values, 1.0)
    # Where λ is rounding, λ t counts as zero: g is t, and the direction does not move in the limit.
    moving = torch.where(torch.isinf(times)[:, None], 0.0, times[:, None].expand(-1, len(values)))
    gains = torch.where(kept, -torch.expm1(-times[:, None] * safe) / safe, moving)
    return torch.einsum("ri,ti,si,sc->trc", vectors, gains, vectors, targets)
