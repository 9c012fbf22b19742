"""``δs = -η P K P* ∇_s loss`` against what a real gradient step does to every state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.agreement import cosine, relative_error
from gramscope.base.charts import agreement_chart
from gramscope.base.checks import check_finite, check_lr
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.capture.network import copied, loss_gradient, named_parameters, unwrap
from gramscope.propagators.build import cast_input
from gramscope.propagators.global_ntk import GlobalNTK, GlobalOptions

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class StatePrediction(Result, shown=("relative_error", "alignment", "loss")):
    """Predicted and measured change of all states in one step, flat, with the loss before it."""

    predicted: Float[Tensor, " N"]
    measured: Float[Tensor, " N"]
    gradient: Float[Tensor, " N"]
    loss: float

    @property
    def relative_error(self) -> float:
        """``|predicted - measured| / |measured|``; of order η for a small step."""
        return relative_error(self.predicted, self.measured)

    @property
    def alignment(self) -> float:
        """The cosine of the two; NaN, with a warning, where one of them is zero."""
        return cosine(self.predicted, self.measured, "the alignment of a predicted and a measured change")

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The change of each state, predicted and measured; a figure."""
        return agreement_chart(self.predicted, self.measured, "Change of the states in one step", axes=axes)


def predict_states(
    model: nn.Module, x: ModelInput, loss: Loss, lr: float, h0: ModelInput = None, **options: Unpack[GlobalOptions]
) -> StatePrediction:
    """The change of every state in one step of plain gradient descent, by theory and by doing it on a copy.

    ``loss`` takes the outputs, with the shape of ``g.C.rows`` (for a recurrent module (trial, time, unit of the last
    layer), else (trial, output)), and returns one number. ``δs = -lr P K P* C* ∇loss``; the measured change is that of
    the states after ``θ <- θ - lr ∇_θ loss``, with the same x. The user's model is not touched.

    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.GRU(3, 8, batch_first=True).double(), torch.randn(4, 6, 3, dtype=torch.float64)
    >>> step = predict_states(model, x, lambda h: (h[:, -1] ** 2).mean(), lr=1e-4)
    >>> step.relative_error < 1e-4
    True
    """
    check_lr(lr)
    g = GlobalNTK(model, x, h0, **options)
    value, gradient = _loss_gradient(g, loss)
    at_states = g.C.T @ gradient
    predicted = -lr * (g.operator @ at_states)
    slope = g.jacobian.T @ at_states
    moved = copied(unwrap(model))
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in moved.parameters()):
        moved = moved.float()
        x, h0 = (cast_input(part, moved, None) for part in (x, h0))
    _step(moved, g, slope, lr)
    after = GlobalNTK(moved, x, h0, **options)
    if after.axes != g.axes:
        raise InputError("the step changed which states exist (data-dependent control flow): take a smaller lr.")
    return StatePrediction(predicted, after.values - g.values, at_states, value)


def _loss_gradient(g: GlobalNTK, loss: Loss) -> tuple[float, Float[Tensor, " M"]]:
    value, gradient = loss_gradient(loss, outputs_of(g), "loss")
    check_finite(value, "the loss", "The outputs are: look for NaN in the targets, or a logarithm of zero.")
    check_finite(gradient, "the loss's gradient at the outputs", "The loss is: look for a root or a norm at zero.")
    return float(value), gradient.reshape(-1)


def outputs_of(g: GlobalNTK) -> Tensor:
    """The model's outputs as captured, shaped like ``g.C.rows``."""
    return g.states.output.reshape(g.C.rows.shape).clone()


def _step(model: nn.Module, g: GlobalNTK, slope: Tensor, lr: float) -> None:
    """Move the parameters of a copy by one step."""
    own = named_parameters(model)
    with torch.no_grad():
        for name, change in g.jacobian.changes(slope[None]).items():
            real_view(own[name]).sub_((lr * change[0]).to(real_view(own[name])))
