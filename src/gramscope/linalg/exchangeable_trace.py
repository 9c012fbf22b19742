"""XTrace: every probe serves to find the range, and to sample what the others left out."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.rng import Distribution, stream
from gramscope.linalg.contraction import contract
from gramscope.linalg.intervals import rounding
from gramscope.linalg.operator import LinearOperator
from gramscope.linalg.orthogonal import gram, inner, norms
from gramscope.linalg.traces import TraceEstimate, draw_probes, finite_product, mean_and_error, require_estimate


@torch.no_grad()
@exact_arithmetic()
def xtrace(op: LinearOperator, products: int, *, distribution: Distribution = "sphere", seed: int = 0) -> TraceEstimate:
    """``tr A ≈ (1/m) Σ_i t_i``, ``t_i = tr(P_i A) + ω_iᵀ (I − P_i) A (I − P_i) ω_i``.

    ``P_i`` projects on the range of ``A Ω`` without its column i, so ω_i is independent of it and each
    t_i is unbiased. The m = products / 2 bases differ from one by a single direction s_i, so all t_i cost
    O(n m²) together: with ``A Ω = Q R``, ``P_i = Q (I − s_i s_iᵀ) Qᵀ`` and ``s_i ∝ R⁻ᵀ e_i``. On the sphere
    the residual ``(I − P_i) ω_i`` is scaled to the length √(n − rank P_i), which lowers the variance. Epperly, Tropp
    & Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J. Matrix Anal. Appl.
    45 (2024), sections 2.1 and 2.3.

    The t_i share their products, so the error of their mean, were they independent, runs low, the more so the more
    of the n directions m takes up. The standard error is ``n / (n − m)`` times that: 0.75 to 2 of the true
    spread on nine spectra up to m = n/2, and more above it.

    >>> from gramscope.linalg import LowRank
    >>> estimate = xtrace(LowRank(torch.ones(8, 1, dtype=torch.float64)), products=8)
    >>> round(estimate.value, 9), estimate.standard_error < 1e-9
    (8.0, True)
    """
    require_estimate(op, products, 4, "xtrace")
    n = op.cols.size
    rng = stream(seed, "xtrace")
    omega = draw_probes(op, min(products // 2, n), distribution, rng)
    image = finite_product(op, omega)
    basis, dropped = leave_one_out(image)
    basis_image = finite_product(op, basis)

    projected = gram(basis, basis_image)
    lost = contract("a probe, a b, b probe -> probe", dropped, projected, dropped)
    overlap = gram(basis, omega)
    kept_overlap = overlap - dropped * contract("a probe, a probe -> probe", dropped, overlap)
    residual = omega - _combine(basis, kept_overlap)
    sampled = inner(residual, image - _combine(basis_image, kept_overlap))
    codimension = n - basis.shape[1] + contract("a probe, a probe -> probe", dropped, dropped).round()
    if distribution == "sphere":
        sampled = sampled * codimension / norms(residual) ** 2
    # Where a projector is the identity nothing is left to sample; 0/0 or rounding stands there now.
    sampled = torch.where(codimension > 0, sampled, 0.0)
    # One probe is all that an operator of size one has room for: it has no spread, and meets the trace exactly.
    exact = (float(projected.trace()), 0.0)
    value, error = exact if n == 1 else mean_and_error(projected.trace() - lost + sampled)
    m, rank = omega.shape[1], basis.shape[1]
    error = max(error * n / max(1, n - rank), rounding(basis, basis_image))
    return TraceEstimate(value, error, m + rank, seed, "xtrace", distribution, op.dtype, op.device, m)


def leave_one_out(
    image: Float[Tensor, "n m"],
) -> tuple[Float[Tensor, "n rank"], Float64[Tensor, "rank m"]]:
    """An orthonormal basis B of the columns of Y, and for each the direction lost without it.

    The range of Y without column i is that of ``B (I − s_i s_iᵀ)``. With the thin SVD ``Y = B Σ Vᵀ`` of
    full rank, ``s_i ∝ Σ⁻¹ Vᵀ e_i``, as ``⟨Σ⁻¹ Vᵀ e_i, Σ Vᵀ e_j⟩ = 0`` for j ≠ i. Where Y is of lower
    rank, a column that the others span costs nothing: s_i = 0. It is so unless row i of V has length 1.
    """
    n, m = image.shape
    eps = torch.finfo(image.dtype).eps
    left, triangle = torch.linalg.qr(image)
    rotation, sizes, rows = torch.linalg.svd(triangle.double())
    rank = int((sizes > max(n, m) * eps * sizes.max()).sum())
    rows = rows[:rank]
    basis = _combine(left, rotation[:, :rank])
    directions = rows / sizes[:rank, None]
    lengths = torch.linalg.vector_norm(directions, dim=0)
    is_needed = torch.linalg.vector_norm(rows, dim=0) > 1 - eps**0.5
    return basis, torch.where(is_needed, directions / torch.where(lengths > 0, lengths, 1.0), 0.0)


def _combine(columns: Float[Tensor, "n a"], small: Float64[Tensor, "a b"]) -> Float[Tensor, "n b"]:
    return contract("n a, a b -> n b", columns, small.to(columns.dtype))
