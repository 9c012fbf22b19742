"""What one gradient step does to the fields: predicted to first order, and measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.charts import agreement_chart
from gramscope.base.checks import check_lr
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.hierarchy.fields import squared_norms

if TYPE_CHECKING:
    from gramscope.hierarchy.fields import Fields


@dataclass(frozen=True, eq=False, repr=False)
class FieldChange(Result):
    """Changes of all fields in one step: lists over layers 0..L, and the outputs."""

    activations: list[Tensor]
    conjugates: list[Tensor]
    outputs: Tensor

    @property
    def residual(self) -> Tensor:
        """``Δe = Δf`` for the squared error, whose targets stand still."""
        return self.outputs

    def __sub__(self, other: "FieldChange") -> "FieldChange":
        return FieldChange(
            [a - b for a, b in zip(self.activations, other.activations, strict=True)],
            [a - b for a, b in zip(self.conjugates, other.conjugates, strict=True)],
            self.outputs - other.outputs,
        )


@dataclass(frozen=True, eq=False, repr=False)
class StepPrediction(FieldChange, shown=("total_decrease", "lr", "loss_decrease", "outputs")):
    """First-order changes at fixed masks; ``loss_decrease[ℓ-1]`` is ``η eᵀ K^ℓ e``, the part of layer ℓ."""

    loss_decrease: Float[Tensor, " L"]
    lr: float

    @property
    def total_decrease(self) -> float:
        """``η eᵀ K e``, by how much the loss falls to first order."""
        return float(self.loss_decrease.sum())


@exact_arithmetic()
def predict_step(fields: "Fields", residual: Tensor, lr: float) -> StepPrediction:
    """Changes of all fields to first order in the learning rate, masks held.

    - ``Δx^ℓ_μ = -η Σ_ν Q^{ℓ-1}_{μν} P^ℓ_{μν} g^ℓ_ν e_ν + D^ℓ_μ W^ℓ Δx^{ℓ-1}_μ``, ``Δx^0 = 0``
    - ``Δg^ℓ_μ = -η Σ_ν A^ℓ_{μν} x^ℓ_ν e_ν``, by its recursion ``-η Σ_ν G^{ℓ+1}_{μν} x^ℓ_ν e_ν + W^{ℓ+1,T} D^{ℓ+1}_μ
      Δg^{ℓ+1}_μ``
    - ``Δf_μ = A Δx^L_μ = -η Σ_ν K_{μν} e_ν``

    (arXiv:2606.09744, sections 4 and 5.) Both sums over ν are products with the gradient of the layer's weights.
    """
    check_lr(lr)
    chain = fields.chain
    weights, biases = fields.gradients(residual)
    change = torch.zeros_like(fields.activations[0])
    activations = [change]
    for layer in range(1, fields.depth + 1):
        pushed = -lr * (fields.activations[layer - 1] @ weights[layer - 1].T) + change @ chain.weights[layer - 1].T
        bias = biases[layer - 1]
        if bias is not None:
            pushed = pushed - lr * bias
        change = fields.slopes(layer) * pushed
        activations.append(change)
    conjugate = torch.zeros_like(fields._conjugates[-1])
    conjugates = [conjugate]
    for layer in range(fields.depth, 0, -1):
        carried = (fields.slopes(layer)[:, None] * conjugate) @ chain.weights[layer - 1]
        conjugate = carried - lr * (fields._signal(layer) @ weights[layer - 1])
        conjugates.append(conjugate)
    return StepPrediction(
        activations=activations,
        conjugates=[fields._public(g) for g in reversed(conjugates)],
        outputs=fields._public(activations[-1] @ chain.readout.T),
        loss_decrease=lr * squared_norms(weights, biases),
        lr=lr,
    )


@dataclass(frozen=True, eq=False, repr=False)
class StepComparison(Result, shown=("errors", "flips", "neurons")):
    """One step, predicted and taken: ``measured = predicted + second_order + by_flips``, exactly, field by field.

    ``held`` is the same finite step with every mask held; what it adds to the prediction is of second order in the
    learning rate, and what the true step adds to it is the work of neurons that crossed zero.
    """

    predicted: StepPrediction
    held: FieldChange
    measured: FieldChange
    flips: list[int]
    neurons: list[int]

    @property
    def second_order(self) -> FieldChange:
        return self.held - self.predicted

    @property
    def by_flips(self) -> FieldChange:
        return self.measured - self.held

    @property
    def flip_fraction(self) -> list[float]:
        """Fraction of (example, neuron) masks that flipped, for layers 1..L."""
        return [flips / count for flips, count in zip(self.flips, self.neurons, strict=True)]

    def errors(self) -> dict[str, float]:
        """Norms of the parts of Δf, as fractions of the norm of the true change; NaN if that is zero."""
        whole = float(self.measured.outputs.norm())
        parts = {
            "predicted": self.predicted.outputs,
            "second order": self.second_order.outputs,
            "mask flips": self.by_flips.outputs,
        }
        return {name: float(part.norm()) / whole if whole else math.nan for name, part in parts.items()}

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The change of each output, predicted and measured; a figure."""
        return agreement_chart(self.predicted.outputs, self.measured.outputs, "Change of the outputs", axes=axes)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {100 * value:.3g} %" for name, value in self.errors().items())
        return f"Change of the outputs: {parts} of the true one. Mask flips by layer: {self.flips}"


def compare_step(fields: "Fields", residual: Tensor, lr: float) -> StepComparison:
    """Predict a step, take it with masks held and with masks free, and count the flips of each layer."""
    predicted = predict_step(fields, residual, lr)
    after = fields.take_step(residual, lr)
    held_activations = after.chain.forward(fields.activations[0], fields.masks)[1]
    held_conjugates = after.chain.backward(fields.n, fields.masks)[0]
    true = _change(fields, after.activations, after._conjugates)
    held = _change(fields, held_activations, held_conjugates)
    neurons = [mask.numel() for mask in fields.masks if mask is not None]
    return StepComparison(predicted, held, true, disagreements(fields.masks, after.masks), neurons)


def disagreements(masks: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[int]:
    """In how many entries the masks of layers 1..L differ."""
    pairs = zip(masks, others, strict=True)
    return [int((one != other).sum()) for one, other in pairs if one is not None and other is not None]


@exact_arithmetic()
def _change(fields: "Fields", activations: list[Tensor], conjugates: list[Tensor]) -> FieldChange:
    moved = [now - then for now, then in zip(activations, fields.activations, strict=True)]
    turned = [now - then for now, then in zip(conjugates, fields._conjugates, strict=True)]
    return FieldChange(moved, [fields._public(g) for g in turned], fields._public(moved[-1] @ fields.chain.readout.T))
