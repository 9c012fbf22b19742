"""The result of ``explain_step``: numbers, a table, a picture, and one sentence."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.charts import agreement_chart
from gramscope.base.checks import check_count
from gramscope.base.errors import InputError
from gramscope.base.html import html_table
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import TableResult
from gramscope.base.shares import shares
from gramscope.hierarchy.optimizer_step import StepParts

HEAD = ("layer", "share of loss change", "|Δθ| / |θ|")
SMALL = 0.1  # a part of the change below this fraction is not worth a warning


class Flips(NamedTuple):
    """How many masks of one activation flipped, of how many."""

    name: str
    flipped: int
    total: int


class Conflict(NamedTuple):
    """Two examples that worked against each other: they pushed each other's loss up, by ``harm`` together."""

    first: int
    second: int
    harm: float


@dataclass(frozen=True, eq=False, repr=False)
class ExplainedStep(TableResult):
    """One optimiser step, explained. Changes are after minus before; a negative loss change is an improvement.

    - ``predicted`` (n, C): ``J Δθ``; ``measured`` (n, C): the change of the outputs; ``held``: the same with all masks
      held, so that ``measured = predicted + second_order + by_flips`` (None where the masks could not be held;
      ``notes`` says why)
    - ``rounding``: how far rounding may move ``measured``, in the norm; what is missed below that has no cause
    - ``shares``: layer -> its share in the first-order loss change; ``parameter_shares`` the same by parameter
    - ``influence[μ, ν]``: first-order change of the loss of example μ caused by the gradient of example ν (negative
      helps); None where examples are coupled
    - ``parts``: the step as ``-D g + memory + decay``; ``parts.preconditioner`` is the metric for ``gs.ntk_operator``
    """

    outputs_before: Float[Tensor, "n C"] = field(repr=False)
    predicted: Float[Tensor, "n C"] = field(repr=False)
    held: Float[Tensor, "n C"] | None = field(repr=False)
    measured: Float[Tensor, "n C"] = field(repr=False)
    rounding: float
    residual: Float[Tensor, "n C"] = field(repr=False)
    loss_before: float
    loss_after: float
    parameter_decrease: dict[str, float] = field(repr=False)
    sizes: dict[str, tuple[float, float]] = field(repr=False)  # |Δθ| and |θ| by parameter
    parts: StepParts = field(repr=False)
    gradients: dict[str, Tensor] = field(repr=False)
    influence: Float[Tensor, "n n"] | None = field(repr=False)
    flips: tuple[Flips, ...] = field(repr=False)
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ExplainedStep: {self.verdict}"

    # The loss ----------------------------------------------------------------------------------------

    @property
    def measured_loss_change(self) -> float:
        return self.loss_after - self.loss_before

    @property
    def predicted_loss_change(self) -> float:
        """``g · Δθ``, to first order; ``-η eᵀ K e`` for plain gradient descent."""
        return -sum(self.parameter_decrease.values())

    @property
    def loss_change_by_part(self) -> dict[str, float]:
        """The first-order loss change, split into what the gradient of now, memory (momentum) and weight decay did."""
        memory = sum(float((g * self.parts.memory[name]).sum()) for name, g in self.gradients.items())
        decay = sum(float((g * self.parts.decay[name]).sum()) for name, g in self.gradients.items())
        return {"gradient": self.predicted_loss_change - memory - decay, "memory": memory, "decay": decay}

    # Layers ------------------------------------------------------------------------------------------

    @property
    def parameter_shares(self) -> dict[str, float]:
        """Share of each parameter in the first-order loss change; negative for one that was pushed the wrong way."""
        return shares(self.parameter_decrease, why="the loss does not change to first order")

    @property
    def shares(self) -> dict[str, float]:
        """The same by layer: the parameters of one module together."""
        found: dict[str, float] = {}
        for name, share in self.parameter_shares.items():
            found[_layer(name)] = found.get(_layer(name), 0.0) + share
        return found

    @property
    def relative_steps(self) -> dict[str, float]:
        """``|Δθ| / |θ|`` of each layer."""
        moved: dict[str, float] = {}
        size: dict[str, float] = {}
        for name, (step, own) in self.sizes.items():
            layer = _layer(name)
            moved[layer], size[layer] = moved.get(layer, 0.0) + step**2, size.get(layer, 0.0) + own**2
        return {layer: (moved[layer] / size[layer]) ** 0.5 if size[layer] else float("inf") for layer in moved}

    # Examples ------------------------------------------------------------------------------------------

    @property
    def example_change(self) -> Float[Tensor, " n"]:
        """First-order change of each example's own loss, ``e_μ · Δf_μ``; they sum to the predicted loss change."""
        return (self.residual * self.predicted).sum(1)

    @property
    def example_effect(self) -> Float[Tensor, " n"]:
        """What each example's gradient did to the loss of all: ``Σ_μ I_{μν}``."""
        return self._influence().sum(0)

    def conflicts(self, k: int = 5) -> list[Conflict]:
        """The k pairs of examples that harmed each other most."""
        check_count(k, "k", least=0)
        influence = self._influence()
        mutual = (influence + influence.T).triu(1)
        found = mutual.flatten().topk(min(k, mutual.numel()))
        n = len(mutual)
        return [
            Conflict(int(i) // n, int(i) % n, float(v))
            for v, i in zip(found.values, found.indices, strict=True)
            if v > 0
        ]

    def _influence(self) -> Tensor:
        if self.influence is None:
            raise InputError(next(note for note in self.notes if "example" in note))
        return self.influence

    # Prediction and truth -----------------------------------------------------------------------------------

    @property
    def second_order(self) -> Float[Tensor, "n C"] | None:
        return None if self.held is None else self.held - self.predicted

    @property
    def by_flips(self) -> Float[Tensor, "n C"] | None:
        return None if self.held is None else self.measured - self.held

    @property
    def errors(self) -> dict[str, float]:
        """Norms of what the prediction missed, as fractions of the true change of the outputs; NaN if that is zero.

        Each part carries rounding, of which "rounding" is an upper estimate.
        """
        whole = float(self.measured.norm())
        missed = {"all": self.measured - self.predicted, "second order": self.second_order, "mask flips": self.by_flips}
        norms = {name: float(part.norm()) for name, part in missed.items() if part is not None}
        norms["rounding"] = self.rounding
        return {name: norm / whole if whole else math.nan for name, norm in norms.items()}

    @property
    def flip_count(self) -> int:
        return sum(flips.flipped for flips in self.flips)

    @property
    def verdict(self) -> str:
        """The step in one sentence."""
        if not any(bool(moved.any()) for moved in self.parts.change.values()):
            if any(bool(g.any()) for g in self.gradients.values()):
                return (
                    "The step changed no parameter: it is below their rounding, or their learning rates are zero; pass "
                    "precision='float64' to see it."
                )
            return "The step changed nothing: all gradients are zero."
        if float(self.measured.norm()) <= self.rounding:
            return (
                "The step changed the outputs by no more than rounding "
                f"({float(self.measured.norm()):.2g}, rounding {self.rounding:.2g}). Pass precision='float64'."
            )
        return f"{self._loss_in_words()}; {self._error_in_words()}."

    def _loss_in_words(self) -> str:
        change, numbers = self.measured_loss_change, f"first order predicted {self.predicted_loss_change:+.3g}"
        leader, share = max(self.shares.items(), key=lambda item: item[1], default=("", 0.0))
        led = f"layer {leader!r} did {100 * share:.0f} % of it" if share > 0 else "no layer helped to first order"
        if abs(change) <= self._loss_rounding:
            return f"The step changed the loss {self.loss_before:.4g} by no more than rounding ({numbers}; {led})"
        went = "lowered" if change < 0 else "raised"
        loss = f"The step {went} the loss from {self.loss_before:.4g} to {self.loss_after:.4g}"
        return f"{loss} ({numbers}, true {change:+.3g}); {led}"

    @property
    def _loss_rounding(self) -> float:
        """That of the outputs, as the loss feels it, and that of the loss itself."""
        own = torch.finfo(self.residual.dtype).eps * abs(self.loss_before)
        return float(self.residual.double().norm()) * self.rounding + own

    def _error_in_words(self) -> str:
        errors = self.errors
        missed = f"the prediction misses the outputs' change by {100 * errors['all']:.2g} %"
        if errors["all"] <= errors["rounding"]:
            limit = f"{100 * errors['rounding']:.2g} %"
            return f"{missed}, no more than rounding may add ({limit})" if errors["all"] >= SMALL else missed
        if self.held is None or errors["all"] < SMALL:
            return missed
        causes = {"mask flips": "mask flips", "second order": "second order: the step is large"}
        part = max(causes, key=lambda name: errors[name])
        return f"{missed}, mostly {causes[part]}" if errors[part] > errors["rounding"] else missed

    # For people ----------------------------------------------------------------------------------------------

    def _for_people(self) -> tuple[list[list[str]], list[str]]:
        """A row for each layer under ``HEAD``, and the lines below: verdict, what was missed, flips, notes."""
        steps = self.relative_steps
        rows = [[layer, f"{100 * share:.1f} %", f"{steps[layer]:.2g}"] for layer, share in self.shares.items()]
        titles = {"all": "missed by first order", "rounding": "rounding, at most"}
        missed = [
            f"{titles.get(name, name)}: {'undefined' if math.isnan(error) else f'{100 * error:.2g} %'}"
            for name, error in self.errors.items()
        ]
        flips = [f"{kind.name}: {kind.flipped} of {kind.total} masks flipped" for kind in self.flips if kind.flipped]
        return rows, [self.verdict, *missed, *flips, *self.notes]

    def __str__(self) -> str:
        from pandas import DataFrame

        rows, lines = self._for_people()
        return "\n".join([DataFrame(rows, columns=list(HEAD)).to_string(index=False), "", *lines])

    def _repr_html_(self) -> str:
        """In a notebook: what each layer did, the verdict, and what first order missed."""
        rows, lines = self._for_people()
        return html_table("What this step did", HEAD, rows, lines)

    def _table(self) -> tuple[dict[str, list[float]], list[str]]:
        """A row a layer: its share of the loss change and its relative step."""
        steps, shares = self.relative_steps, self.shares
        return {"share": list(shares.values()), "relative_step": [steps[layer] for layer in shares]}, list(shares)

    def to_dict(self) -> Mapping[str, object]:
        """All numbers that JSON can hold."""
        return {
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "predicted_loss_change": self.predicted_loss_change,
            "loss_change_by_part": self.loss_change_by_part,
            "shares": self.shares,
            "parameter_shares": self.parameter_shares,
            "relative_steps": self.relative_steps,
            "errors": {name: None if math.isnan(error) else error for name, error in self.errors.items()},
            "flips": [flips._asdict() for flips in self.flips],
            "verdict": self.verdict,
            "notes": list(self.notes),
        }

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """Shares by layer, prediction against truth, what examples did to each other, and the parts of the error.

        With ``axes`` the second alone is drawn there.
        """
        if axes is not None:
            return agreement_chart(self.predicted, self.measured, "Change of every output", axes=axes)
        from gramscope.hierarchy.step_pictures import picture_of_step

        return picture_of_step(self)


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter
