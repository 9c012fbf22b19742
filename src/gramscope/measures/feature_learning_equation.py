"""The Feature Learning Equation: the gradient of a weight, seen from the features that the weight reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_finite, check_number, check_tensor, shape_or_type
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.results import Result
from gramscope.base.user_warnings import undefined
from gramscope.capture import capture
from gramscope.capture.network import (
    Precision,
    at_precision,
    check_precision,
    copied,
    count_examples,
    evaluate,
    named_parameters,
    prepare_input,
    unwrap_with_input,
)
from gramscope.capture.side_effects import checked_gradients, plain_execution, untouched
from gramscope.hierarchy.losses import Targets
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.measure import Measure
from gramscope.measures.rows import check_size
from gramscope.measures.weight_matrices import WeightForm, check_same_weights, weight_forms

Loss = Callable[[Tensor], Tensor]


def feature_learning_residual(weight: Tensor, gradient: Tensor, inputs: Tensor, input_gradients: Tensor) -> float:
    """How far the Feature Learning Equation is from holding, relative to the larger of its two sides.

    ``|Wᵀ ∇_W L - (∇_H L)ᵀ H| / max(|Wᵀ ∇_W L|, |(∇_H L)ᵀ H|)`` in Frobenius norm; 0 where both sides vanish.

    Shapes: ``weight`` and ``gradient`` (m, d), ``inputs`` H and ``input_gradients`` ∇_H L (n, d), the latter the part
    that flows through this weight. Any floating dtype; computed in float64. Reference: arXiv:2605.06258, the Feature
    Learning Equation (arXiv:2605.06258, first item).

    Example:
        >>> H, W = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
        >>> dZ = torch.randn(5, 4, dtype=torch.float64)
        >>> feature_learning_residual(W, dZ.T @ H, H, dZ @ W) < 1e-14
        True
    """
    w, g = _matrix(weight, "weight"), _matrix(gradient, "gradient")
    h, dh = _matrix(inputs, "inputs"), _matrix(input_gradients, "input_gradients")
    if w.shape != g.shape or h.shape != dh.shape or w.shape[1] != h.shape[1]:
        raise InputError(
            "weight and gradient must have one shape (m, d), inputs and input_gradients one shape (n, d), d the same, "
            f"got {tuple(w.shape)}, {tuple(g.shape)}, {tuple(h.shape)}, {tuple(dh.shape)}. For a convolution pass the "
            "unfolded input and the weight as (out, in · kernel)."
        )
    return relative_residual(w.mT @ g, dh.mT @ h)


def relative_residual(left: Tensor, right: Tensor) -> float:
    """``|left - right| / max(|left|, |right|)``; 0 where both vanish."""
    scale = max(float(left.norm()), float(right.norm()))
    return float((left - right).norm()) / scale if scale else 0.0


@dataclass(frozen=True, eq=False, repr=False)
class WeightLearning(Result, shown=("residual", "rows")):
    """What one batch and one loss say about one weight, group by group (g = 1 but for grouped convolutions).

    ``weight`` W and ``gradient`` ∇_W L (g, o, i), the latter by plain autograd; ``cross`` (∇_H L)ᵀ H and ``covariance``
    HᵀH (g, i, i) from the captured inputs and signals. ``rows`` counts examples times positions times uses.
    """

    name: str
    weight: Float[Tensor, "g o i"]
    gradient: Float[Tensor, "g o i"]
    cross: Float[Tensor, "g i i"]
    covariance: Float[Tensor, "g i i"]
    gradient_covariance: Float[Tensor, "g i i"]
    rows: int

    @property
    def gram(self) -> Float[Tensor, "g i i"]:
        """``WᵀW``."""
        return self.weight.mT @ self.weight

    @property
    def residual(self) -> float:
        """``|Wᵀ∇_W L - (∇_H L)ᵀH|``, relative: the two sides come from independent backward passes."""
        return relative_residual(self.weight.mT @ self.gradient, self.cross)

    def virtual_change(self, lr: float) -> Float[Tensor, "g i i"]:
        """First-order change of the virtual covariance, ``-η ((∇_H L)ᵀH + Hᵀ∇_H L)``: what the Gram matrix learns."""
        return -lr * (self.cross + self.cross.mT)

    def virtual_covariance(self, lr: float) -> Float[Tensor, "g i i"]:
        """``H̃ᵀH̃`` of the virtual update ``H̃ = H - η ∇_H L``."""
        return self.covariance + self.virtual_change(lr) + lr**2 * self.gradient_covariance

    def gram_step(self, lr: float) -> Float[Tensor, "g i i"]:
        """The Gram change of the step ``-η ∇_W L``, from features: ``(H̃ᵀH̃ - HᵀH) + η² (GᵀG - ∇_Hᵀ∇_H)``. Exact."""
        second_order = self.gradient.mT @ self.gradient - self.gradient_covariance
        return self.virtual_covariance(lr) - self.covariance + lr**2 * second_order

    def merged(self, other: "WeightLearning") -> "WeightLearning":
        """The same for the sum of two losses on two batches."""
        return WeightLearning(
            self.name,
            self.weight,
            self.gradient + other.gradient.to(self.weight),
            self.cross + other.cross.to(self.weight),
            self.covariance + other.covariance.to(self.weight),
            self.gradient_covariance + other.gradient_covariance.to(self.weight),
            self.rows + other.rows,
        )


@dataclass(frozen=True, eq=False, repr=False)
class WeightLearnings(ByWeight[WeightLearning]):
    """:class:`WeightLearning` by weight name; ``left_out`` names every other parameter and says why."""

    loss: float

    def merged(self, other: "WeightLearnings") -> "WeightLearnings":
        """The sum over two batches of one network in one state."""
        check_same_weights(*({name: w.weight for name, w in one.items()} for one in (self, other)))
        weights = {name: weight.merged(other[name]) for name, weight in self.items()}
        return WeightLearnings(weights, self.left_out, self.loss + other.loss)

    @property
    def residual(self) -> float:
        """The largest residual of any weight."""
        return max(weight.residual for weight in self.values())


def feature_learning(
    model: nn.Module,
    x: ModelInput,
    loss: Loss,
    *,
    weights: str | Sequence[str] = "*",
    precision: Precision = "float64",
) -> WeightLearnings:
    """The Feature Learning Equation ``Wᵀ ∇_W L = (∇_H L)ᵀ H`` for every weight of a network.

    The left side is plain autograd, the right side the captured inputs and signals, so the residual is a test of both.
    It holds for any loss and any network above, biases included. For a convolution H is the unfolded input; a weight
    used several times sums over its uses. If several weights take one input, ∇_H L is the part through this weight.

    Args:
        model: any module; it is copied and not touched.
        x: a batch, as for :func:`gramscope.capture`.
        loss: a function of the outputs (n, C) that returns one number, e.g. ``lambda f: cross_entropy(f, y)``.
        weights: glob, or globs, of parameter names; the rest is not contracted.
        precision: "float64" (default) or "float32" runs a copy in that dtype, None the model's own, "tf32" that with
            TF32 on the GPU; the residual shows their rounding.

    Reference: arXiv:2605.06258, the Feature Learning Equation and the exact Gram step.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
        >>> x, y = torch.randn(5, 1, 3, 3), torch.tensor([0, 1, 0, 1, 1])
        >>> found = feature_learning(model, x, lambda f: torch.nn.functional.cross_entropy(f, y))
        >>> list(found), found.residual < 1e-13
        (['0.weight', '3.weight'], True)
    """
    check_precision(precision)
    if not callable(loss):
        raise InputError(f"loss must be a function of the outputs that returns one number, got {loss!r}.")
    loss = _explained(loss, precision)
    model, x = private_copy(model, x, precision)
    snapshot = capture(model, x, directions=loss, precision=precision)
    forms = weight_forms(snapshot).chosen(weights)
    parameters = named_parameters(model)
    value, gradients = _plain_gradients(model, x, loss, tf32=precision == "tf32")
    found = {
        name: _contract(name, use, parameters[use.parameter], gradients[use.parameter]) for name, use in forms.items()
    }
    return WeightLearnings(found, forms.left_out, value)


class FeatureLearning(Measure[WeightLearnings, WeightLearnings]):
    """:func:`feature_learning` batch by batch: ``update(x, y)`` for a loss of outputs and targets.

    The loss must be a sum over examples (``reduction="sum"``), so that those of batches add up to that of all.

    >>> from torch.nn.functional import cross_entropy
    >>> model, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.randint(2, (8,))
    >>> measure = FeatureLearning(model, lambda f, y: cross_entropy(f, y, reduction="sum"))
    >>> found = measure.over([(x[:3], y[:3]), (x[3:], y[3:])])
    >>> whole = feature_learning(model, x, lambda f: cross_entropy(f, y, reduction="sum"))
    >>> torch.allclose(found["weight"].cross, whole["weight"].cross)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        *,
        weights: str | Sequence[str] = "*",
        precision: Precision = "float64",
    ) -> None:
        check_precision(precision)
        self.model, self.loss, self.globs, self.precision = model, loss, weights, precision

    def update(self, x: ModelInput, *targets: Targets) -> WeightLearnings:
        return feature_learning(
            self.model, x, lambda f: self.loss(f, *targets), weights=self.globs, precision=self.precision
        )

    def compute(self, state: WeightLearnings) -> WeightLearnings:
        return state


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
    gram, cross = (check_tensor(t, what).detach().double() for t, what in ((gram, "gram"), (cross, "cross")))
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


def _contract(name: str, use: WeightForm, parameter: Tensor, gradient: Tensor) -> WeightLearning:
    weight = use.form.matrices(parameter)
    cross, covariance, gradient_covariance = (weight.new_zeros(len(weight), *2 * weight.shape[2:]) for _ in range(3))
    rows = 0
    for inputs, signals in use.rows():
        back = signals[:, 0] @ weight  # ∇_H L, the part through this weight
        cross += back.mT @ inputs
        covariance += inputs.mT @ inputs
        gradient_covariance += back.mT @ back
        rows += inputs.shape[1]
    return WeightLearning(name, weight, use.form.matrices(gradient), cross, covariance, gradient_covariance, rows)


def _plain_gradients(model: nn.Module, x: ModelInput, loss: Loss, *, tf32: bool) -> tuple[float, dict[str, Tensor]]:
    """Value of the loss, and its gradient for every parameter, by autograd alone."""
    # The model is a copy of ours; only the random streams are the user's.
    with untouched(nn.Identity()), exact_arithmetic(tf32=tf32), plain_execution():
        n = count_examples(x)
        value = loss(evaluate(model, prepare_input(x), n, None))
        named = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        gradients = checked_gradients(value, list(named.values()))
    zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), gradients, strict=True))
    return float(value.detach()), dict(zip(named, zeros, strict=True))


def _explained(loss: Loss, precision: str | None) -> Loss:
    """The loss, with advice where its targets do not fit the dtype of the copy."""

    def explained(f: Tensor) -> Tensor:
        try:
            return loss(f)
        except RuntimeError as error:
            words = ("dtype", "scalar type", "Double")
            if precision in ("float64", "float32") and any(word in str(error) for word in words):
                cast = ".double()" if precision == "float64" else ".float()"
                raise InputError(
                    f"the loss must take {precision} outputs, since the model runs as a {precision} copy. Cast its "
                    f"targets and weights with {cast}, or pass precision=None. The loss said: {error}"
                ) from error
            raise

    return explained


def private_copy(model: nn.Module, x: ModelInput, precision: Precision) -> tuple[nn.Module, ModelInput]:
    """The model and x in the dtype asked for, sharing nothing with the user's."""
    own, x = unwrap_with_input(model, x)
    model, x = at_precision(own, x, precision)
    # A copy carries none of the user's gradient hooks, which a backward pass here would set off.
    return (copied(own) if model is own else model), x


def _matrix(tensor: Tensor, what: str) -> Float[Tensor, "rows cols"]:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.is_complex():
        raise InputError(f"{what} must be a real matrix, got {shape_or_type(tensor)}.")
    return tensor.detach().double()
