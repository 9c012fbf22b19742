"""A step of a weight in two parts: one that changes the Gram matrix ``WᵀW``, one that only turns the outputs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite, check_plain
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rounding import EPS64, Rounding, singular_floor
from gramscope.measures.rows import check_size

__all__ = ["StepSplit", "gram_only_step", "split_step"]

Method = Literal["sylvester", "procrustes"]
Keep = Literal["altering", "preserving"]


@dataclass(frozen=True, eq=False, repr=False)
class StepSplit(Result):
    """``step = altering + preserving``, (..., m, d) each; by Sylvester the two are orthogonal (Frobenius)."""

    shown: ClassVar[tuple[str, ...]] = ("share", "altering")

    altering: Float[Tensor, "*g m d"]
    preserving: Float[Tensor, "*g m d"]

    @property
    def share(self) -> float:
        """Share of the squared norm of the step that alters the Gram matrix; 0 for a zero step."""
        altering, preserving = (float(part.square().sum()) for part in (self.altering, self.preserving))
        return altering / (altering + preserving) if altering + preserving else 0.0


def split_step(weight: Tensor, step: Tensor, method: Method = "sylvester") -> StepSplit:
    """The parts of a step D that alter and that preserve the Gram matrix of W; they sum to D.

    "sylvester", for small steps: the preserving part is ``A W`` with A antisymmetric and
    ``S A + A S = D Wᵀ - W Dᵀ``, ``S = W Wᵀ``: the projection of D on the directions in which ``WᵀW`` stands still.
    Solved in the singular basis ``W = U Σ Vᵀ``, ``X = Uᵀ D V``, where nothing is divided by a small number:
    ``Uᵀ(AW)V = (X_ij σ_j² - X_ji σ_i σ_j) / (σ_i² + σ_j²)``; what D adds outside the columns of W turns them, too.

    "procrustes", for finite steps: the altering part leads to ``Q (W + D)``, which has exactly the Gram matrix of
    ``W + D`` (see :func:`gram_only_step`); the rest is the turn from there. Both agree to first order in D.

    Shapes: ``weight`` and ``step`` (..., m, d), wide, tall or rank-deficient, any floating dtype; float64 comes back.
    Where W has no extent beyond its rounding (a zero weight, the null space of its rows) the step alters. Reference:
    arXiv:2605.06258, Gram-altering and Gram-preserving parts.

    Example:
        >>> W = torch.eye(2)
        >>> split = split_step(W, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        >>> split.altering.tolist(), split.preserving.tolist()
        ([[1.0, 1.0], [1.0, 1.0]], [[0.0, 1.0], [-1.0, 0.0]])
    """
    w, d = _weight_and(weight, step, "step")
    if method not in ("sylvester", "procrustes"):
        raise InputError(f'method must be "sylvester" or "procrustes", got {method!r}.')
    if method == "procrustes":
        altering = gram_only_step(w, w + d) - w
        return StepSplit(altering, d - altering)
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    keep = s > torch.maximum(max(w.shape[-2:]) * EPS64 * s[..., :1], singular_floor(w, Rounding.of(weight)))
    s = torch.where(keep, s, 0.0)
    inside = u.mT @ d @ vt.mT  # X
    rows, cols = s[..., :, None], s[..., None, :]
    weights = rows.square() + cols.square()
    turned = (inside * cols.square() - inside.mT * rows * cols) / torch.where(weights > 0, weights, 1.0)
    # Along left singular vectors of σ = 0, and outside the columns of W, only Dᵀ meets W: the rule above with σ_i = 0.
    outside = (d @ vt.mT - u @ inside) * keep[..., None, :]
    preserving = (u @ turned + outside) @ vt
    return StepSplit(d - preserving, preserving)


def gram_only_step(before: Tensor, after: Tensor, keep: Keep = "altering") -> Float[Tensor, "*g m d"]:
    """The weight after a finite step ``W₁ → W₂`` of which only one part was taken, exactly.

    With Q the orthogonal factor of ``W₁W₂ᵀ`` (Procrustes: Q turns W₂ as near to W₁ as it can): "altering" gives
    ``Q W₂``, whose Gram matrix is that of W₂ to rounding; "preserving" gives ``Qᵀ W₁``, whose Gram matrix is that of
    W₁. Where Q is not determined (rank-deficient weights) the turn nearest to the identity is taken, so no step gives
    no turn.

    Shapes: (..., m, d) both; the SVD is of at most min(m, 2d) rows. Float64 comes back. Newton-Schulz iterations are
    not used: ten of them err by more than the step itself. Reference: arXiv:2605.06258, Gram-only step.

    Example:
        >>> W, turn = torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> gram_only_step(W, turn @ (2 * W)).tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    if keep not in ("altering", "preserving"):
        raise InputError(f'keep must be "altering" or "preserving", got {keep!r}.')
    w1, w2 = _weight_and(before, after, "after")
    basis = None
    if w1.shape[-2] > 2 * w1.shape[-1]:
        # Q moves nothing outside the span of the columns of both, so a tall weight is turned within that span.
        basis = torch.linalg.qr(torch.cat([w1, w2], dim=-1))[0]
        w1, w2 = basis.mT @ w1, basis.mT @ w2
    rounding = max(Rounding.of(before), Rounding.of(after), key=lambda r: r.eps)
    q = _nearest_turn(_without_rounding(w1, rounding) @ _without_rounding(w2, rounding).mT)
    result = q @ w2 if keep == "altering" else q.mT @ w1
    return result if basis is None else basis @ result


def _without_rounding(w: Float[Tensor, "*g m d"], rounding: Rounding) -> Float[Tensor, "*g m d"]:
    """W without the directions that are rounding: how they turn means nothing."""
    floor = singular_floor(w, rounding)
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    shifted = gram - floor.square()[..., None] * torch.eye(gram.shape[-1], dtype=w.dtype, device=w.device)
    if bool((torch.linalg.cholesky_ex(shifted).info == 0).all()):  # all are above the floor, at a tenth of the cost
        return w
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    return (u * torch.where(s > floor, s, 0.0)[..., None, :]) @ vt


def _nearest_turn(product: Float[Tensor, "*g m m"]) -> Float[Tensor, "*g m m"]:
    """The orthogonal polar factor; on null spaces the orthogonal map nearest to the identity."""
    left, s, right = torch.linalg.svd(product)
    keep = s > s.shape[-1] * EPS64 * s[..., :1]
    if bool(keep.all()):
        return left @ right
    flat = [
        _complete(p, r, int(k.sum()))
        for p, r, k in zip(
            left.reshape(-1, *left.shape[-2:]),
            right.reshape(-1, *right.shape[-2:]),
            keep.reshape(-1, keep.shape[-1]),
            strict=True,
        )
    ]
    return torch.stack(flat).reshape(product.shape)


def _complete(left: Float[Tensor, "m m"], right: Float[Tensor, "m m"], rank: int) -> Float[Tensor, "m m"]:
    free_left, free_right = left[:, rank:], right[rank:]
    p, _, r = torch.linalg.svd(free_left.mT @ free_right.mT)
    return left[:, :rank] @ right[:rank] + free_left @ (p @ r) @ free_right


def _weight_and(weight: Tensor, other: Tensor, what: str) -> tuple[Tensor, Tensor]:
    for tensor, name in ((weight, "weight"), (other, what)):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        check_plain(tensor, name)
    if weight.shape != other.shape or weight.dim() < 2 or weight.numel() == 0:
        raise InputError(
            f"weight and {what} must have one shape (m, d) with m, d > 0, got {tuple(weight.shape)} and "
            f"{tuple(other.shape)}. A convolution's weight is (out, in · kernel): weight.flatten(1)."
        )
    for tensor, name in ((weight, "weight"), (other, what)):
        check_finite(tensor, name, "The run has diverged: load an earlier checkpoint.")
    check_size(weight, "weight")
    return weight.detach().double(), other.detach().double()
