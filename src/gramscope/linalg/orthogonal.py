"""Inner products, norms and orthonormal bases of columns, with the sums in float64."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.linalg.contraction import contract


def inner(x: Float[Tensor, "n k"], y: Float[Tensor, "n k"]) -> Float64[Tensor, " k"]:
    """``⟨x_j, y_j⟩`` for each column j."""
    return contract("n column, n column -> column", x.double(), y.double())


def norms(x: Float[Tensor, "n k"]) -> Float64[Tensor, " k"]:
    """``‖x_j‖`` for each column j."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64)
    return lengths


def gram(x: Float[Tensor, "n a"], y: Float[Tensor, "n b"]) -> Float64[Tensor, "a b"]:
    """``xᵀ y``, every column against every column."""
    return contract("n a, n b -> a b", x.double(), y.double())


def project_out(x: Float[Tensor, "n k"], basis: Float[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    """``x`` less its part in the span of an orthonormal ``basis``.

    Twice, because the first pass leaves a part of the size of the rounding error of what it removed, and
    the second removes that too (Giraud, Langou & Rozložník, "The loss of orthogonality in the
    Gram-Schmidt orthogonalization process", Comput. Math. Appl. 50, 2005).
    """
    for _ in range(2):
        overlap = contract("n basis, n column -> basis column", basis, x)
        x = x - contract("n basis, basis column -> n column", basis, overlap)
    return x


def orthonormal_columns(x: Float[Tensor, "n k"]) -> Float[Tensor, "n r"]:
    """An orthonormal basis, ``r <= k`` columns, of the span of ``x``.

    Columns are first scaled to one length; directions in which less than 10 √n rounding units of it remain are taken as
    already spanned.
    """
    tol = 10 * len(x) ** 0.5 * torch.finfo(x.dtype).eps
    lengths = norms(x)
    left, triangle = torch.linalg.qr(x[:, lengths > 0] / lengths[lengths > 0].to(x.dtype))
    rotation, sizes, _ = torch.linalg.svd(triangle)
    return contract("n column, column kept -> n kept", left, rotation[:, sizes > tol])
