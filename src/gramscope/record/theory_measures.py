"""Measures of single theories: collapse, concentration of co-activation, the feature ansatz, modes, rank of states."""

import math

import torch
from torch import Tensor

from gramscope import measures
from gramscope.capture.network import named_parameters
from gramscope.hierarchy.mask_concentration import concentration, overlap_rank
from gramscope.propagators import GlobalNTK, participation_ratio, structural_rank_bound
from gramscope.record.feature_measures import masks_by_layer
from gramscope.record.measurement import Measurement
from gramscope.record.subject import evaluating, layer_matrices, layer_of
from gramscope.record.watched_measures import (
    _NO_LAST,
    MeasuredValues,
    eigenfunction_curves,
    seconds,
    watched_measure,
)

TOP = 5  # dimension of the eigenspaces that are compared
_NO_CLASSES = "not defined: the probe must have one class for each example, and a linear layer that scores them."
_FEW = "not defined: half of the probe must be more examples than the last layer has inputs. Take a larger probe."
PRODUCTS = 8  # random vectors of an estimated rank
_NO_FIRST_WEIGHTS = "not defined: the weights of the first measurement are not kept in the run's folder."


@watched_measure(
    "collapse", "Neural collapse of the last features, NC1 to NC4 and class-distance variance: 0 in full collapse."
)
def measure_collapse(measurement: Measurement) -> MeasuredValues:
    y = measurement.labels_or_values
    one_label_each = not y.is_floating_point() and y.numel() == len(y)
    if not one_label_each or measurement.subject.objective.kind != "classes":
        return MeasuredValues()  # numbers or positions: there is nothing that could collapse
    last = measurement.last
    if last is None or last not in measurement.features:
        return MeasuredValues()
    form = measures.weight_forms(measurement.subject.model).get(last)
    weight = None if form is None else form.form.matrices(named_parameters(measurement.subject.model)[last])[0]
    features, labels = measurement.features[last], y.reshape(-1)
    counted = (labels >= 0).to(features.device)
    if len(labels[labels >= 0].unique()) < 2:
        return MeasuredValues(missing={"collapse": _NO_CLASSES})
    rows = (features[counted], labels.to(features.device)[counted], measurement.f[counted])
    found = measures.neural_collapse(*rows, weight=weight)
    names = ("nc1", "nc2", "nc3", "nc4", "cdnv")
    values = {f"collapse/{name}": getattr(found, name) for name in names}
    return MeasuredValues({name: value for name, value in values.items() if value is not None})


@watched_measure(
    "concentration",
    "Participation ratio of co-activation and of the pullback metric, by layer, and whether the weights follow it.",
    needs_targets=False,
    by_default=False,
    guess=seconds(passes=1, eigenvalues=2),
)
def measure_concentration(measurement: Measurement) -> MeasuredValues:
    weights = layer_matrices(measurement.subject.model)
    if measurement.memory.weights is None and not measurement.memory.resumed:
        measurement.memory.weights = {name: weight.clone() for name, weight in weights.items()}
    measured = MeasuredValues()
    for layer, mask in masks_by_layer(measurement).items():
        measured.scalars |= _concentration(measurement, layer, mask, weights.get(layer))
    if measurement.memory.weights is None:
        measured.missing["update_alignment"] = _NO_FIRST_WEIGHTS
    return measured


def _concentration(measurement: Measurement, layer: str, mask: Tensor, weight: Tensor | None) -> dict[str, float]:
    if weight is None or len(weight) != mask.shape[1]:
        ranks = overlap_rank(mask), overlap_rank(mask, center=True)
        return {f"coactivation_rank/{layer}": ranks[0], f"coactivation_rank_centred/{layer}": ranks[1]}
    start = None if measurement.memory.weights is None else measurement.memory.weights.get(layer)
    moved = start is not None and start.shape == weight.shape and not torch.equal(start, weight)
    (found,) = concentration([weight], [mask], initial_weights=[start] if moved and start is not None else None, k=TOP)
    values: dict[str, float] = {
        f"coactivation_rank/{layer}": found.coactivation_rank,
        f"coactivation_rank_centred/{layer}": found.centred_rank,
        f"metric_rank/{layer}": found.metric_rank,
    }
    if found.alignment is not None:
        values[f"update_alignment/{layer}"] = found.alignment.overlap
    return values


@watched_measure(
    "ansatz",
    "Neural feature ansatz: correlation of WᵀW with the root of the average gradient outer product, by weight.",
    needs_targets=False,
    by_default=False,
    guess=seconds(passes=2),
)
def measure_ansatz(measurement: Measurement) -> MeasuredValues:
    subject = measurement.subject
    with evaluating(subject.model):
        found = measures.neural_feature_ansatz(subject.model, subject.x, outputs=subject.outputs)
    return MeasuredValues({f"ansatz/{name}": value for name, value in found.items() if subject.layers(layer_of(name))})


@watched_measure(
    "modes",
    "Eigenfunctions of the last features: how many the outputs use, how constant the first one is, and whether strong "
    "ones are good ones (rank correlation of quality and intensity).",
    by_default=False,
)
def measure_modes(measurement: Measurement) -> MeasuredValues:
    last = measurement.last
    if last is None:
        return MeasuredValues(missing={"modes": _NO_LAST})
    rows = len(measurement.output_rows)
    features, targets = measurement.along_loss.features[last][:rows], measurement.targets[:rows]
    curves = eigenfunction_curves(measurement, features)
    if curves is None:
        return MeasuredValues(missing={"modes": _FEW})
    found = {
        "modes/utilisation_dimension": measures.utilisation_dimension(curves),
        "modes/constant": measures.eigenmodes(features, targets.double().reshape(len(targets), -1)).constant,
        "modes/quality_intensity": measures.curve_correlation(curves).quality_intensity,
    }
    return MeasuredValues({name: value for name, value in found.items() if value is not None and math.isfinite(value)})


@watched_measure(
    "state_rank",
    "In how many directions a step can move the states: participation ratio of P K P*, with its standard error, and "
    "the bound that the inputs of the weights set to its rank.",
    needs_targets=False,
    by_default=False,
    guess=seconds(passes=4 * PRODUCTS),
)
def measure_state_rank(measurement: Measurement) -> MeasuredValues:
    subject = measurement.subject
    with evaluating(subject.model):
        g = GlobalNTK(subject.model, subject.x, outputs=subject.outputs)
    found = participation_ratio(g.operator, products=PRODUCTS)
    return MeasuredValues({
        "state_rank/participation_ratio": found.value,
        "state_rank/standard_error": found.standard_error,
        "state_rank/bound": float(structural_rank_bound(g)),
    })  # fmt: skip
