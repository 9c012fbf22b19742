"""Virtual updates of features, their covariance, and what a gradient step does to the Gram matrix of a weight."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_choice, check_finite, check_lr, check_tensor
from gramscope.base.errors import InputError
from gramscope.measures.measure import Measure

Gradients = Literal["loss", "example"]


def virtual_update(inputs: Tensor, input_gradients: Tensor, lr: float) -> Float[Tensor, "*rows d"]:
    """The features after a gradient step on them, ``H̃ = H - η ∇_H L``; they are never put into the network.

    Shapes: ``inputs`` and ``input_gradients`` (..., d), any floating dtype; float64 (..., d) comes back. For a sum over
    steps pass ``Σ_t ∇_H L_t``. Reference: arXiv:2605.06258, virtual update.

    Example:
        >>> import torch
        >>> virtual_update(torch.ones(1, 2), torch.tensor([[1.0, -1.0]]), lr=0.5).tolist()
        [[0.5, 1.5]]
    """
    check_lr(lr)
    h, dh = _pair(inputs, input_gradients)
    return h - lr * dh


def virtual_covariance(
    inputs: Tensor, input_gradients: Tensor, lr: float, *, gradients: Gradients = "loss"
) -> Float[Tensor, "d d"]:
    """``H̃ᵀH̃`` of the virtual update ``H̃ = H - η ∇_H L``, uncentred.

    ``gradients`` says what ``input_gradients`` are. "loss": gradients of one loss of the whole batch, as a backward
    pass gives them; the sum over rows is taken, and ``H̃ᵀH̃ - HᵀH`` matches the change of ``WᵀW`` in a step of rate η to
    first order. "example": each row is the gradient of its own example's loss; the mean over rows is taken, which
    matches a step on the mean loss.

    Shapes: (..., d) both; all axes but the last are rows. Float64 (d, d) comes back. Reference: arXiv:2605.06258,
    virtual covariance.

    Example:
        >>> import torch
        >>> virtual_covariance(torch.eye(2), torch.eye(2), lr=0.5).tolist()
        [[0.25, 0.0], [0.0, 0.25]]
    """
    return VirtualCovariance(lr, gradients=gradients)(inputs, input_gradients)


def gram_step(weight: Tensor, gradient: Tensor, lr: float) -> Float[Tensor, "*g d d"]:
    """The exact change of the Gram matrix in the step ``W⁺ = W - η G``: ``-η (WᵀG + GᵀW) + η² GᵀG``.

    By the Feature Learning Equation this equals ``(H̃ᵀH̃ - HᵀH) + η² (GᵀG - ∇_Hᵀ∇_H)``; written out it does not cancel,
    as ``W⁺ᵀW⁺ - WᵀW`` does. Shapes: (..., m, d) both; float64 (..., d, d) comes back.
    Reference: arXiv:2605.06258, exact Gram step.

    Example:
        >>> import torch
        >>> gram_step(torch.eye(2), torch.ones(2, 2), lr=0.5).tolist()
        [[-0.5, -0.5], [-0.5, -0.5]]
    """
    check_lr(lr)
    w, g = (check_tensor(t, what).detach().double() for t, what in ((weight, "weight"), (gradient, "gradient")))
    if w.shape != g.shape or w.dim() < 2:
        raise InputError(f"weight and gradient must have one shape (m, d), got {tuple(w.shape)} and {tuple(g.shape)}.")
    first = w.mT @ g
    return lr**2 * (g.mT @ g) - lr * (first + first.mT)


@dataclass(frozen=True, eq=False)
class VirtualMoments:
    """Sums over rows of ``h hᵀ``, ``∇ hᵀ`` and ``∇ ∇ᵀ``, (d, d) each: the virtual covariance of every rate."""

    rows: int
    inputs: Float[Tensor, "d d"]
    cross: Float[Tensor, "d d"]
    gradients: Float[Tensor, "d d"]

    def merged(self, other: "VirtualMoments") -> "VirtualMoments":
        if self.inputs.shape != other.inputs.shape:
            raise InputError(
                f"states of the same width can be merged, got widths {len(self.inputs)} and {len(other.inputs)}."
            )
        return VirtualMoments(
            self.rows + other.rows,
            self.inputs + other.inputs.to(self.inputs),
            self.cross + other.cross.to(self.inputs),
            self.gradients + other.gradients.to(self.inputs),
        )


class VirtualCovariance(Measure[VirtualMoments, Tensor]):
    """The virtual covariance batch by batch; see :func:`virtual_covariance`.

    The state holds the three second moments, so ``compute`` with another rate needs no second pass.

    >>> import torch
    >>> measure, H, dH = VirtualCovariance(lr=0.5), torch.randn(6, 2), torch.randn(6, 2)
    >>> state = measure.merge(measure.update(H[:1], dH[:1]), measure.update(H[1:], dH[1:]))
    >>> torch.allclose(measure.compute(state), virtual_covariance(H, dH, 0.5), atol=1e-12)
    True
    """

    def __init__(self, lr: float, *, gradients: Gradients = "loss") -> None:
        check_choice(gradients, "gradients", get_args(Gradients))
        check_lr(lr)
        self.lr, self.gradients = lr, gradients

    def update(self, inputs: Tensor, input_gradients: Tensor) -> VirtualMoments:
        h, dh = _pair(inputs, input_gradients, least=0)
        h, dh = h.reshape(-1, h.shape[-1]), dh.reshape(-1, h.shape[-1])
        return VirtualMoments(len(h), h.mT @ h, dh.mT @ h, dh.mT @ dh)

    def compute(self, state: VirtualMoments) -> Float[Tensor, "d d"]:
        if state.rows == 0:
            raise InputError("the virtual covariance needs at least one row of inputs and gradients, got none.")
        total = state.inputs - self.lr * (state.cross + state.cross.mT) + self.lr**2 * state.gradients
        return total / state.rows if self.gradients == "example" else total


def _pair(inputs: Tensor, input_gradients: Tensor, *, least: int = 1) -> tuple[Tensor, Tensor]:
    for tensor, what in ((inputs, "inputs"), (input_gradients, "input_gradients")):
        check_tensor(tensor, what)
        check_finite(tensor, what, "Look for overflow, or for a run that has diverged.")
    shape = inputs.shape
    if shape != input_gradients.shape or not shape or shape[-1] == 0 or math.prod(shape[:-1]) < least:
        raise InputError(
            f"inputs and input_gradients must have one shape (..., d), d > 0{' and at least one row' * least}, got "
            f"{tuple(inputs.shape)} and {tuple(input_gradients.shape)}."
        )
    return inputs.detach().double(), input_gradients.detach().to(inputs.device).double()
