"""How near a training with weight decay is to its end: the Gram matrix then is the features' own gradient product."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gramscope.base.checks import check_finite, check_number
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.user_warnings import undefined
from gramscope.capture.network import Precision
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.feature_learning_equation import Loss, feature_learning
from gramscope.measures.rows import check_size

__all__ = ["Stationarity", "stationarity", "stationarity_residual"]


def stationarity_residual(gram: Tensor, cross: Tensor, weight_decay: float) -> float:
    """Distance from ``WᵀW = -(1/λ) (∇_H L)ᵀ H``, which holds where ``∇_W L + λ W = 0``, relative to ``|WᵀW|``.

    0 at a stationary point of ``L + (λ/2)|W|²``; 1 where the gradient vanishes and decay goes on alone; large early in
    training. Shapes: ``gram`` WᵀW and ``cross`` (∇_H L)ᵀH (..., d, d). NaN, with a warning, for a zero weight.
    Reference: arXiv:2605.06258, stationary point with weight decay.

    Example:
        >>> import torch
        >>> stationarity_residual(torch.eye(2), -0.5 * torch.eye(2), weight_decay=0.5)
        0.0
    """
    why = "Without decay a stationary point says nothing of WᵀW."
    check_number(weight_decay, "weight_decay", above=0.0, hint=why)
    gram, cross = gram.detach().double(), cross.detach().double()
    for matrix, name in ((gram, "gram"), (cross, "cross")):
        check_finite(matrix, name, "The run has diverged: load an earlier checkpoint.")
        check_size(matrix, name, power=2)
    if gram.shape != cross.shape:
        raise InputError(f"gram and cross must have one shape, got {tuple(gram.shape)} and {tuple(cross.shape)}.")
    size = float(gram.norm())
    if size == 0:
        return undefined("the stationarity residual", "the weight is zero")
    return float((gram + cross / weight_decay).norm()) / size


@dataclass(frozen=True, eq=False, repr=False)
class Stationarity(ByWeight[float]):
    """The residual of each weight; ``left_out`` names every other parameter and says why."""


def stationarity(
    model: nn.Module,
    x: ModelInput,
    loss: Loss,
    weight_decay: float,
    *,
    weights: str | Sequence[str] = "*",
    precision: Precision = "float64",
) -> Stationarity:
    """The residual of ``WᵀW = -(1/λ) (∇_H L)ᵀ H`` for every weight: a measure of convergence under weight decay.

    ``loss`` is the training loss of the outputs, without the decay term, on (a sample of) the training data; λ as SGD's
    ``weight_decay``. AdamW decouples decay from the gradient's scale and ends elsewhere: there the residual does not go
    to 0. Arguments are those of :func:`feature_learning`. Reference: as for :func:`stationarity_residual`.

    Example:
        >>> import torch
        >>> model, x = torch.nn.Linear(3, 2, bias=False), torch.randn(5, 3)
        >>> list(stationarity(model, x, lambda f: f.square().mean(), weight_decay=0.1))
        ['weight']
    """
    found = feature_learning(model, x, loss, weights=weights, precision=precision)
    residuals = {name: stationarity_residual(w.gram, w.cross, weight_decay) for name, w in found.items()}
    return Stationarity(residuals, found.left_out)
