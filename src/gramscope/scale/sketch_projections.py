"""Random matrices P (d, m) with ``E[P Pᵀ] = 1``: inner products of ``Pᵀ v`` are right on average."""

import math
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.rng import child_seed

Method = Literal["learned", "orthogonal"]


def random_projection(d: int, m: int, *, seed: int) -> Float[Tensor, "d m"]:
    """A float64 matrix P with ``E[P Pᵀ] = 1``, drawn from ``seed`` alone; the identity where m = d.

    Its m columns are orthonormal, in uniformly random directions, times √(d/m).

    >>> P = random_projection(6, 3, seed=0)
    >>> torch.allclose(P.T @ P, 2 * torch.eye(3, dtype=torch.float64))
    True
    """
    if not 1 <= m <= d:
        raise InputError(f"a projection must have between 1 and {d} columns to have {d} rows, got {m}.")
    if m == d:
        return torch.eye(d, dtype=torch.float64, device="cpu")
    rng = np.random.default_rng(child_seed(seed, "orthogonal", d, m))
    q, r = np.linalg.qr(rng.standard_normal((d, m)))
    signs = np.where(np.diagonal(r) < 0, -1.0, 1.0)  # LAPACK chooses them; here they are random again
    return torch.from_numpy(q * signs * math.sqrt(d / m))


def _hadamard_columns(d: int, m: int, rng: np.random.Generator) -> np.ndarray:
    """Random signs times m columns of a Hadamard matrix, which has (-1)^|i & j| in row i and column j; entries ±1/√m.

    ``E[P Pᵀ] = 1`` (SRHT; Tropp 2011, arXiv:1011.1595).
    """
    size = 1 << max(0, d - 1).bit_length()
    columns = rng.choice(size, m, replace=False)
    common = np.arange(d)[:, None] & columns[None, :]
    parity = np.zeros_like(common)
    while common.any():
        parity ^= common & 1
        common >>= 1
    signs = rng.integers(0, 2, d) * 2 - 1
    return signs[:, None] * (1 - 2 * parity) / math.sqrt(m)


def beside_basis(basis: Float[Tensor, "d q"], m: int, *, seed: int) -> Float[Tensor, "d m"]:
    """``[U, (1 - U Uᵀ) Q]``: exact within the span of an orthonormal ``basis`` U, random (SRHT) and unbiased beside it.

    ``E[P Pᵀ] = U Uᵀ + (1 - U Uᵀ) = 1`` whatever U is, so long as it was not chosen with a look at Q. What U spans, the
    large part of most gradients, has no error at all; the error is that of the rest.

    >>> U = torch.eye(5, dtype=torch.float64)[:, :2]
    >>> P = beside_basis(U, 3, seed=0)
    >>> torch.equal(P[:2, :2], torch.eye(2, dtype=torch.float64)), bool((P[:2, 2:] == 0).all())
    (True, True)
    """
    d, q = basis.shape
    if m == d:
        return torch.eye(d, dtype=torch.float64, device="cpu")
    rng = np.random.default_rng(child_seed(seed, "beside", d, m))
    # Columns of a Hadamard matrix are orthogonal but for signs and padding: as good as QR, and far cheaper for large m.
    drawn = torch.from_numpy(_hadamard_columns(d, m - q, rng))
    return torch.cat([basis, drawn - basis @ (basis.T @ drawn)], 1)
