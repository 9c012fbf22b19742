"""Measured over training: accumulated flow, units that classes share, target linearity beside collapse."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from gramscope import measures
from gramscope.base.errors import InputError
from gramscope.hierarchy.accumulated_flow import AccumulatedFlow, CoactivationSubspace, coactivation_subspace
from gramscope.hierarchy.class_coactivation import shared_activation
from gramscope.record.measurement import Measurement
from gramscope.record.probe_pass import probe_pass
from gramscope.record.relu_units import ReluUnits
from gramscope.record.subject import layer_matrices, layers_by_id, weight_keys
from gramscope.record.watched_measures import MeasuredValues, seconds, watched_measure

_RESUMED = "not defined: the weights of the measurements before this run was resumed are not kept in its folder."
_NO_CLASSES = "not defined: the probe must have one class for each example, and two classes at least."
_NO_MATRIX = "what comes last before the ReLU is not one weight matrix with a row for each unit (a norm, say)."
PERMUTATIONS = 100  # shuffled labels of the null


@dataclass(eq=False)
class LayerFlow:
    """The accumulated flow of one layer's weight, for both sides, and the weight and subspaces of last time."""

    flows: dict[str, AccumulatedFlow] = field(default_factory=dict)
    weight: Tensor | None = None
    spaces: dict[str, CoactivationSubspace] = field(default_factory=dict)

    def add(self, weight: Tensor, mask: Tensor) -> None:
        if self.weight is not None and self.weight.shape == weight.shape:
            for side, space in self.spaces.items():
                self.flows.setdefault(side, AccumulatedFlow()).add(weight.double() - self.weight.double(), space)
        self.weight = weight.clone()
        self.spaces = {side: coactivation_subspace(weight, mask, side=side) for side in ("input", "output")}


@watched_measure(
    "flow",
    "Share of the weights' accumulated change in the subspace that co-activation selects: of the pullback metric "
    "(input side) and of the most shared units (output side), beside that of a change in no direction in particular.",
    needs_targets=False,
    by_default=False,
    guess=seconds(passes=1, eigenvalues=1),
)
def measure_flow(measurement: Measurement) -> MeasuredValues:
    if measurement.memory.flows is None:
        if measurement.memory.resumed:
            return MeasuredValues(missing={"flow": _RESUMED})
        measurement.memory.flows = {}
    measured, weights, without = MeasuredValues(), layer_matrices(measurement.subject.model), list[str]()
    for layer, mask in masks_by_layer(measurement).items():
        weight = weights.get(layer)
        if weight is None or len(weight) != mask.shape[1]:
            without.append(layer)
            continue
        try:
            measurement.memory.flows.setdefault(layer, LayerFlow()).add(weight, mask)
        except InputError as error:  # no two examples share a unit
            measured.missing[f"flow/{layer}"] = f"not defined: {error}"
            continue
        for side, flow in measurement.memory.flows[layer].flows.items():
            found = flow.share()
            if found.steps:
                measured.scalars[f"flow_share_{side}/{layer}"] = found.path_share
                measured.scalars[f"flow_baseline_{side}/{layer}"] = found.baseline
    if without:
        measured.missing["flow"] = f"not defined for {', '.join(without)}: {_NO_MATRIX}"
    return measured


def masks_by_layer(measurement: Measurement) -> dict[str, Tensor]:
    """Masks of each chosen layer that has one ReLU, by example (and position), on the CPU."""
    units = ReluUnits(layers_by_id(measurement.subject.model), by_example=True)
    with probe_pass(measurement.subject, units):
        pass
    found = units.on_by_layer()
    return {
        layer: masks[0].cpu() for layer, masks in found.items() if measurement.subject.layers(layer) and len(masks) == 1
    }


def class_labels(measurement: Measurement) -> Tensor | None:
    """The probe's labels on the CPU, where there is one for each example and they are of two classes at least."""
    y = measurement.labels_or_values
    if y.is_floating_point() or y.numel() != len(y) or measurement.subject.objective.kind != "classes":
        return None
    labels = y.reshape(-1).cpu()
    return labels if len(labels[labels >= 0].unique()) > 1 else None


@watched_measure(
    "sharing",
    "Do examples of one class share active units? Cosine of the masks within and between classes, and how many "
    "standard deviations their gap lies above that of shuffled labels.",
    by_default=False,
    guess=seconds(passes=1),
)
def measure_sharing(measurement: Measurement) -> MeasuredValues:
    labels, measured = class_labels(measurement), MeasuredValues()
    if labels is None:
        return MeasuredValues(missing={"sharing": _NO_CLASSES})
    for layer, mask in masks_by_layer(measurement).items():
        if len(mask) % len(labels):
            measured.missing[f"sharing/{layer}"] = (
                "not defined: its ReLU does not see the same positions of each example."
            )
            continue
        each = labels.repeat_interleave(len(mask) // len(labels))  # the positions of an example have its class
        counted = each >= 0
        try:
            found = shared_activation(mask[counted], each[counted], permutations=PERMUTATIONS)
        except InputError as error:  # nearly all examples switch no unit on
            measured.missing[f"sharing/{layer}"] = f"not defined: {error}"
            continue
        measured.scalars[f"sharing_within/{layer}"] = found.within
        measured.scalars[f"sharing_between/{layer}"] = found.between
        if found.null_std > 0:
            measured.scalars[f"sharing_z/{layer}"] = found.z
    return measured


@watched_measure(
    "linearity_collapse",
    "Target linearity and neural collapse of what each layer reads, classes weighing the same: NC1 of the best linear "
    "map of the features, and the bounds that the target linearity sets to it.",
    by_default=False,
    guess=seconds(passes=1),
)
def measure_linearity_collapse(measurement: Measurement) -> MeasuredValues:
    labels, measured = class_labels(measurement), MeasuredValues()
    if labels is None:
        return MeasuredValues(missing={"linearity_collapse": _NO_CLASSES})
    counted, keys = labels >= 0, weight_keys(measurement.subject.model)
    for name, rows in measurement.features.items():
        if len(rows) != len(labels):
            measured.missing[f"linearity_collapse/{name}"] = "not defined: its inputs are not one row for each example."
            continue
        layer = keys.get(name, name)
        found = measures.linearity_collapse(rows.cpu()[counted], labels[counted])
        values = {
            "balanced_linearity": found.target_linearity, "feature_nc1": found.nc1, "fitted_nc1": found.fitted_nc1,
            "fitted_nc1_lower": found.lower, "fitted_nc1_upper": found.upper,
        }  # fmt: skip
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        measured.scalars |= {f"{key}/{layer}": value for key, value in finite.items()}
    return measured
