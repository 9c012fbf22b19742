"""Many steps in field space: the field equations integrated, and how far they drift from true training."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.charts import line_chart
from gramscope.base.checks import check_choice, check_count, check_lr
from gramscope.base.errors import InputError
from gramscope.base.progress_bar import progress
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import TableResult
from gramscope.hierarchy.chain import Chain
from gramscope.hierarchy.fields import Fields, targets_like
from gramscope.hierarchy.step import disagreements

Residual = Callable[[Tensor], Tensor]
Layers = list[Tensor | None]  # None for a layer that has none


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(TableResult, columns=("drift",)):
    """Outputs predicted and true at steps 0..S, and what became of the fields.

    ``drift[t]`` is ``|f_predicted - f_true| / |f_true - f_true(0)|`` (0 at t = 0), ``field_drift[t, ℓ]`` the same for
    ``x^ℓ``, ``flips[t, ℓ-1]`` the number of masks in which the two disagree. ``ended`` says why S is less than the
    steps asked for, if it is: the field equations, or gradient descent itself, went to infinity in the step after.
    """

    predicted: Float[Tensor, "steps n C"]
    measured: Float[Tensor, "steps n C"]
    drift: Float[Tensor, " steps"]
    field_drift: Float[Tensor, "steps layers"]
    flips: Tensor
    ended: str = ""

    def __str__(self) -> str:
        drift = f"the outputs drifted by {100 * float(self.drift[-1]):.3g} % of their true change"
        ended = f"; {self.ended}" if self.ended else ""
        return f"Trajectory of {len(self.drift) - 1} steps: {drift}{ended}"

    def __repr__(self) -> str:
        return str(self)

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The drift of outputs and of each layer's fields over the steps; a figure."""
        fields = {f"layer {place}": self.field_drift[:, place] for place in range(self.field_drift.shape[1])}
        steps = range(len(self.drift))
        return line_chart(list(steps), {"outputs": self.drift, **fields}, "Drift from true training", "step", axes=axes)


@exact_arithmetic()
def predict_trajectory(
    fields: Fields,
    y: Tensor | Residual,
    lr: float,
    steps: int,
    masks: str = "follow",
) -> Trajectory:
    """Integrate the field equations for many steps and compare with true gradient descent from the same start.

    The state is the pre-activation fields ``h^ℓ``, the conjugate fields ``g^ℓ`` and the elementary transports ``W^ℓ``.
    One step:

    - ``W^ℓ ← W^ℓ + ΔW^ℓ``, ``ΔW^ℓ = -η Σ_ν e_ν b^ℓ_ν x^{ℓ-1}_νᵀ``
    - ``h^ℓ_μ ← h^ℓ_μ + ΔW^ℓ x^{ℓ-1}_μ + W^ℓ Δx^{ℓ-1}_μ``; the term ``ΔW Δx`` of second order is what the equations
      neglect
    - ``g^ℓ_μ ← g^ℓ_μ + ΔW^{ℓ+1,T} b^{ℓ+1}_μ + W^{ℓ+1,T} Δb^{ℓ+1}_μ``

    Args:
        y: targets, for the loss ``½ Σ (f - y)²``; or a function f -> ∂loss/∂f.
        masks: "follow" reads them from the integrated ``h``; "held" keeps those of the start.

    One layer deep the equations are exact, flips included. In deeper networks they may diverge where training does
    not, because the neglected terms add up in ``g``. Where the top layer dies, the true conjugates of the layers below
    are zero, but those of the equations keep what has added up. The trajectory then ends there and says so.

    Reference: arXiv:2606.09744, sections 4 to 6; the paper keeps masks held.
    """
    check_lr(lr)
    check_count(steps, "steps")
    check_choice(masks, "masks", ("follow", "held"))
    residual = _residual(fields, y)
    start = fields.chain, fields.single, fields.preactivations, fields.activations, fields.masks, fields._conjugates
    state, true = _IntegratedFields(*start), fields
    predicted, outputs, field_drift, flips = (
        [state.outputs],
        [fields.outputs],
        [fields.outputs.new_zeros(fields.depth + 1)],
        [[0] * fields.depth],
    )
    ended = ""
    with progress("steps in field space", steps) as advance:
        for step in range(1, steps + 1):
            state = state.stepped(residual(state.outputs), lr, masks == "follow")
            try:
                true = true.take_step(residual(true.outputs), lr)
            except InputError:  # a field of the stepped weights is not finite; the residual was checked by our own step
                ended = f"gradient descent diverged at step {step}: lower lr"
                break
            if not state.is_finite(residual):
                ended = f"the field equations diverged at step {step}, gradient descent did not"
                break
            predicted.append(state.outputs)
            outputs.append(true.outputs)
            both = zip(fields.activations, state.activations, true.activations, strict=True)
            field_drift.append(torch.stack([relative_size(x - t, t - start) for start, x, t in both]))
            flips.append(disagreements(state.masks, true.masks))
            advance()
    shape = (len(outputs), fields.n, -1)
    integrated, found = torch.stack(predicted).reshape(shape), torch.stack(outputs).reshape(shape)
    drift = torch.stack([relative_size(f - t, t - found[0]) for f, t in zip(integrated, found, strict=True)])
    return Trajectory(integrated, found, drift, torch.stack(field_drift), torch.tensor(flips, device="cpu"), ended)


class _IntegratedFields(Fields):
    """Fields as integrated, which are no longer those of any weights."""

    def __init__(self, chain: Chain, single: bool, h: Layers, x: list[Tensor], masks: Layers, g: list[Tensor]) -> None:
        self.chain, self.single, self.preactivations, self.activations, self.masks = chain, single, h, x, masks
        self._conjugates = g
        self._signals = [None, *(self.slopes(layer)[:, None] * g[layer] for layer in range(1, chain.depth + 1))]

    def is_finite(self, residual: Residual) -> bool:
        """Everything that another step would start from is finite."""
        fields = [*self.activations, *self._conjugates, *self.preactivations]
        tensors = [*fields, *self.chain.weights, residual(self.outputs)]
        return all(t is None or bool(torch.isfinite(t).all()) for t in tensors)

    def stepped(self, residual: Tensor, lr: float, follow: bool) -> "_IntegratedFields":
        weights, biases = self.gradients(residual)
        chain = self.chain.stepped(weights, biases, lr)
        h, x, masks = self._forward(weights, biases, lr, follow)
        after = _IntegratedFields(chain, self.single, h, x, masks, self._conjugates)
        return _IntegratedFields(chain, self.single, h, x, masks, self._backward(after, weights, lr))

    def _forward(
        self, weights: list[Tensor], biases: Layers, lr: float, follow: bool
    ) -> tuple[Layers, list[Tensor], Layers]:
        h, x, masks = list[Tensor | None]([None]), [self.activations[0]], list[Tensor | None]([None])
        for layer in range(1, self.depth + 1):
            before, below, bias = self.preactivations[layer], self.activations[layer - 1], biases[layer - 1]
            assert before is not None
            now = before - lr * (below @ weights[layer - 1].T) + (x[-1] - below) @ self.chain.weights[layer - 1].T
            now = now if bias is None else now - lr * bias
            mask = now > 0 if follow else self.masks[layer]
            assert mask is not None
            h.append(now)
            masks.append(mask)
            x.append(self.chain.slopes(layer, mask) * now)
        return h, x, masks

    def _backward(self, after: "_IntegratedFields", weights: list[Tensor], lr: float) -> list[Tensor]:
        conjugates = [self._conjugates[-1]]
        for layer in range(self.depth, 0, -1):
            turned = after.slopes(layer)[:, None] * conjugates[-1] - self._signal(layer)
            change = turned @ self.chain.weights[layer - 1] - lr * (self._signal(layer) @ weights[layer - 1])
            conjugates.append(self._conjugates[layer - 1] + change)
        return conjugates[::-1]


def _residual(fields: Fields, y: Tensor | Residual) -> Residual:
    if callable(y) and not isinstance(y, Tensor):
        return y
    target = targets_like(fields, y)
    return lambda f: f - target


def relative_size(difference: Tensor, whole: Tensor) -> Float[Tensor, ""]:
    """``|difference| / |whole|``, or ``|difference|`` where the whole is zero."""
    size = whole.norm()
    return difference.norm() / torch.where(size > 0, size, torch.ones_like(size))
