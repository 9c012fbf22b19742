"""How many directions a spectrum spreads over: three definitions of the literature, each under its own name.

======================  =============================  ==============================================  ==============
name                    formula                        source                                          [9, 1, 1, 1]
======================  =============================  ==============================================  ==============
participation ratio     ``(Σλ)² / Σλ²``                Bell & Dean 1970; Gao et al. 2017               1.71
effective rank          ``exp(-Σ p ln p)``, p = λ/Σλ   Roy & Vetterli 2007                             2.31
stable rank             ``Σλ / λ_max``                 Rudelson & Vershynin 2007                       1.33
======================  =============================  ==============================================  ==============

All three are 1 for one direction and k for k equal ones. λ are the eigenvalues of a positive semi-definite matrix: a
kernel, a covariance, ``WᵀW``. (Of a matrix itself, Roy & Vetterli take the singular values.)
"""

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite, check_tensor
from gramscope.base.errors import InputError
from gramscope.base.user_warnings import undefined


def participation_ratio(eigenvalues: Float[Tensor, " p"]) -> float:
    """``(Σλ)² / Σλ²``: the number of directions, counted by weight. NaN, with a warning, where all are zero.

    >>> participation_ratio(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    >>> round(participation_ratio(torch.tensor([9.0, 1.0, 1.0, 1.0])), 3)
    1.714
    """
    values = _relative(eigenvalues)
    return float(ratio_of_traces(values.sum(), values.square().sum(), "a participation ratio"))


def participation_ratio_of(matrix: Float[Tensor, "n n"], what: str = "the matrix") -> float:
    """The participation ratio ``tr(K)² / tr(K²)`` of a symmetric matrix, without its eigenvalues.

    >>> participation_ratio_of(torch.diag(torch.tensor([1.0, 1.0, 0.0])))
    2.0
    """
    scale = matrix.abs().max().double()
    k = matrix.double() / torch.where(scale > 0, scale, 1.0)
    return float(ratio_of_traces(k.trace(), k.square().sum(), "a participation ratio", what))


def ratio_of_traces(
    trace: Float[Tensor, "*k"], square: Float[Tensor, "*k"], name: str = "", what: str = "the spectrum"
) -> Float[Tensor, "*k"]:
    """``tr(A)² / tr(A²)`` from the two traces, or from estimates of them; NaN where the second is zero."""
    if name and not bool(square.any()):
        undefined(name, f"{what} is zero")
    return trace.square() / square


def effective_rank(eigenvalues: Float[Tensor, " p"]) -> float:
    """``exp(-Σ p ln p)`` with ``p = λ/Σλ``, the exponential of the spectral entropy (Roy & Vetterli 2007).

    NaN, with a warning, where all are zero.

    >>> round(effective_rank(torch.tensor([9.0, 1.0, 1.0, 1.0])), 3)
    2.309
    """
    values = _relative(eigenvalues)
    if not bool(values.any()):
        return undefined("an effective rank", "all eigenvalues are zero")
    p = values / values.sum()
    return float(torch.special.entr(p).sum().exp())


def check_eigenvalues(eigenvalues: Tensor) -> Float[Tensor, " p"]:
    """The eigenvalues of a positive semi-definite matrix in float64; those below zero by rounding are zero."""
    if check_tensor(eigenvalues, "eigenvalues").dim() != 1 or len(eigenvalues) == 0:
        raise InputError(f"eigenvalues must have shape (p,) with p > 0, got {tuple(eigenvalues.shape)}.")
    values = eigenvalues.detach().double()
    check_finite(values, "eigenvalues", "Look for overflow in what they are of.")
    largest = float(values.abs().max())
    rounding = torch.finfo(eigenvalues.dtype if eigenvalues.is_floating_point() else torch.float64).eps
    if float(values.min()) < -rounding * len(values) * largest:
        raise InputError(
            "eigenvalues must be those of a positive semi-definite matrix, so at least 0, got values from "
            f"{float(values.min()):.3g} to {float(values.max()):.3g}."
        )
    return values.clamp(min=0)


def _relative(eigenvalues: Tensor) -> Float[Tensor, " p"]:
    """The eigenvalues, the largest of which is 1: their squares stay within float64."""
    values = check_eigenvalues(eigenvalues)
    return values / values.max() if bool(values.any()) else values
