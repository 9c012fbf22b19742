"""Target linearity and virtual covariance of what each weight reads: patches of convolutions, tokens of attention.

A weight reads rows: a convolution unfolded patches, a linear layer on a sequence its tokens, a weight that is used
several times all its uses. *Positions are samples* (docs/linearity.md). Groups of a convolution are read side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_choice, check_lr, check_tensor
from gramscope.base.class_labels import one_hot_present
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.capture import capture
from gramscope.capture.network import Precision, check_precision, named_parameters
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.feature_learning_equation import Loss, private_copy
from gramscope.measures.linear_targets import TargetLinearity, TargetLinearityValue, TriangularState
from gramscope.measures.virtual_updates import virtual_update
from gramscope.measures.weight_matrices import WeightForm, example_blocks, weight_forms


@dataclass(frozen=True, eq=False, repr=False)
class WeightLinearity(Result):
    """Target linearity of the inputs of one weight, ``inputs``, and of its virtual update, ``virtual`` (None: no loss).

    ``rows`` counts the samples, ``positions`` the rows of one example. ``covariance`` is ``HᵀH`` and
    ``virtual_covariance`` ``H̃ᵀH̃`` over the same samples (p, p), p the fan-in of all groups.
    """

    inputs: TargetLinearityValue
    virtual: TargetLinearityValue | None
    covariance: Float[Tensor, "p p"]
    virtual_covariance: Float[Tensor, "p p"] | None
    rows: int
    positions: int


@dataclass(frozen=True, eq=False, repr=False)
class WeightLinearities(ByWeight[WeightLinearity]):
    """:class:`WeightLinearity` by weight name; ``left_out`` names every other parameter and says why."""


@dataclass(frozen=True, eq=False)
class WeightTargets:
    """Targets of examples or of positions, as rows for the samples of a site.

    ``values`` is (n, c), or (n, T, c) by position; ``counted`` (n, T) says which positions have a target at all.
    """

    values: Float[Tensor, "n *T c"]
    counted: Tensor | None

    @classmethod
    def of(cls, targets: Tensor) -> "WeightTargets":
        """From labels (n,) or, by position, (n, T), where -100 or any negative number means none; or numbers."""
        if check_tensor(targets, "targets").dim() not in (1, 2, 3) or len(targets) == 0:
            raise InputError(
                "targets must be labels (n,), by position (n, T), or numbers (n,), (n, c) or (n, T, c), got shape "
                f"{tuple(targets.shape)}."
            )
        if targets.is_floating_point():
            values = targets.detach().double()
            return cls(values[:, None] if values.dim() == 1 else values, None)
        labels = (targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets).detach().long()
        counted = labels >= 0
        if not bool(counted.any()) or (labels.dim() == 1 and not bool(counted.all())):
            raise InputError("labels must be classes from 0; only labels by position may be left out (-100).")
        hot = one_hot_present(labels.clamp(min=0).flatten()).reshape(*labels.shape, -1)
        return cls(hot, counted if labels.dim() == 2 else None)

    def by_position(self) -> bool:
        return self.values.dim() == 3

    def rows(self, examples: slice, positions: int, name: str) -> tuple[Tensor, Tensor]:
        """Targets (n T, c) of these examples at all positions, and which of them count."""
        values = self.values[examples]
        if not self.by_position():
            spread = values[:, None].expand(-1, positions, -1).flatten(0, 1)
            return spread, torch.ones(len(spread), dtype=torch.bool, device=spread.device)
        if values.shape[1] != positions:
            raise InputError(
                f"targets by position must have the {positions} positions of the inputs of weight {name!r}, got "
                f"{values.shape[1]}. Choose weights with weights=, or give one target for each example."
            )
        every = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        kept = every if self.counted is None else self.counted[examples]
        return values.flatten(0, 1), kept.flatten()


def weight_target_linearity(
    model: nn.Module,
    x: object,
    targets: Tensor,
    loss: Loss | None = None,
    *,
    lr: float = 1.0,
    weights: str | Sequence[str] = "*",
    samples: str = "positions",
    center: bool = False,
    precision: Precision = "float64",
) -> "WeightLinearities":
    """Target linearity of the inputs of every weight matrix, as they are and after a virtual update.

    ``TL`` of H and of ``H̃ = H - η ∇_H L``, H the rows that the weight is multiplied with, ∇_H L the part of the
    gradient through this weight.

    Args:
        model: any module; it is copied and not touched.
        x: a batch, as for :func:`gramscope.capture`.
        targets: labels (n,) or numbers (n,), (n, c); by position labels (n, T), negative where there is none, or
            numbers (n, T, c).
        loss: a function of the outputs (n, C) that returns one number; None leaves the virtual update out.
        lr: η of the virtual update.
        weights: glob, or globs, of parameter names.
        samples: "positions", each a sample; or "examples", the mean over the positions of each.
        center: centre the rows too, as in :func:`gramscope.measures.target_linearity`.
        precision: as for :func:`gramscope.measures.feature_learning`.

    Returns a dict by weight name; its ``left_out`` names the other parameters and says why (biases, embeddings, a layer
    that the loss does not reach). Reference: arXiv:2605.06258, virtual covariance and target linearity; the convention
    for positions is ours.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
        >>> x, y = torch.randn(8, 1, 3, 3), torch.arange(8) % 2
        >>> found = weight_target_linearity(model, x, y, lambda f: torch.nn.functional.cross_entropy(f, y))
        >>> {name: (v.rows, v.positions, v.inputs.rank) for name, v in found.items()}
        {'0.weight': (32, 4, 4), '3.weight': (8, 1, 8)}
    """
    check_precision(precision)
    check_choice(samples, "samples", ("positions", "examples"))
    given = WeightTargets.of(targets)
    if samples == "examples" and given.by_position():
        raise InputError('targets by position need samples="positions": a mean over positions has no target.')
    own, inputs = private_copy(model, x, precision)
    snapshot = capture(own, inputs, directions=loss or (lambda f: f.sum()), precision=precision)
    if len(given.values) != snapshot.examples:
        raise InputError(f"targets must have {snapshot.examples} rows, one for each example, got {len(given.values)}.")
    parameters, chosen = named_parameters(own), weight_forms(snapshot).chosen(weights)
    measure = TargetLinearity(center=center, classes=None, dtype=None)
    rate = None if loss is None else check_lr(lr)
    found = {
        name: _measured(measure, name, use, parameters[use.parameter], given, samples, rate)
        for name, use in chosen.items()
    }
    return WeightLinearities(found, chosen.left_out)


def _measured(
    measure: TargetLinearity, name: str, use: WeightForm, parameter: Tensor, given: WeightTargets, samples: str,
    lr: float | None,
) -> WeightLinearity:  # fmt: skip
    total: list[TriangularState] = []
    for h, gradient, y in _samples(name, use, use.form.matrices(parameter), given, samples):
        kinds = [h] if lr is None else [h, virtual_update(h, gradient, lr)]
        fresh = [measure.update(kind, y.to(kind)) for kind in kinds]
        total = [old.merged(new) for old, new in zip(total, fresh, strict=True)] if total else fresh
    if not total or total[0].n == 0:
        raise InputError(
            f"weight {name!r} must have an input row with a target, but no row has one. Check the targets."
        )
    values, covariances = [measure.compute(state) for state in total], [state.covariance() for state in total]
    virtual, its_covariance = (None, None) if lr is None else (values[1], covariances[1])
    return WeightLinearity(values[0], virtual, covariances[0], its_covariance, total[0].n, use.sites[0].positions)


def _samples(
    name: str, use: WeightForm, weight: Float[Tensor, "g o i"], given: WeightTargets, samples: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows, their gradients and their targets, some examples at a time."""
    for site in use.sites:
        for some in example_blocks(site):
            h = site.inputs_of(some).double().flatten(2)
            signals = site.signals[some, 0].double()
            gradient = torch.einsum("ntgo,goi->ntgi", signals, weight).flatten(2)
            if samples == "examples":
                # The gradient at a mean is the sum over what it is the mean of, divided alike.
                yield h.mean(1), gradient.mean(1), given.values[some].to(h)
                continue
            y, counted = given.rows(some, h.shape[1], name)
            counted = counted.to(h.device)
            yield h.flatten(0, 1)[counted], gradient.flatten(0, 1)[counted], y.to(h)[counted]
