"""Readings of single theories: neural collapse, concentration of co-activation, the neural feature ansatz."""

import torch
from torch import Tensor

from gramscope import measures
from gramscope.capture.network import named_parameters
from gramscope.hierarchy.mask_concentration import concentration, overlap_rank
from gramscope.record.layer_weights import layer_matrices
from gramscope.record.measurement import Measurement
from gramscope.record.probe_pass import probe_pass
from gramscope.record.relu_units import ReluUnits
from gramscope.record.subject import evaluating, layer_of, layers_by_id
from gramscope.record.watched_measures import MeasuredValues, seconds, watched_measure

TOP = 5  # dimension of the eigenspaces that are compared
_NO_CLASSES = "not defined: the probe must have one class for each example, and a linear layer that scores them."
_NO_FIRST_WEIGHTS = "not defined: the weights of the first measurement are not kept in the run's folder."


@watched_measure(
    "collapse", "Neural collapse of the last features, NC1 to NC4 and class-distance variance: 0 in full collapse."
)
def measure_collapse(measurement: Measurement) -> MeasuredValues:
    y, last = measurement.labels_or_values, measurement.last
    one_label_each = (
        not y.is_floating_point() and y.numel() == len(y) and measurement.subject.objective.kind == "classes"
    )
    if last is None or last not in measurement.features or not one_label_each:
        return MeasuredValues()  # numbers or positions: there is nothing that could collapse
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
    units = ReluUnits(layers_by_id(measurement.subject.model), by_example=True)
    with probe_pass(measurement.subject, units):
        pass
    weights = layer_matrices(measurement.subject.model)
    if measurement.memory.weights is None and not measurement.memory.resumed:
        measurement.memory.weights = {name: weight.clone() for name, weight in weights.items()}
    measured = MeasuredValues()
    for layer, masks in units.on_by_layer().items():
        if measurement.subject.layers(layer) and len(masks) == 1:
            measured.scalars |= _concentration(measurement, layer, masks[0], weights.get(layer))
    if measurement.memory.weights is None:
        measured.missing["update_alignment"] = _NO_FIRST_WEIGHTS
    return measured


def _concentration(measurement: Measurement, layer: str, mask: Tensor, weight: Tensor | None) -> dict[str, float]:
    mask = mask.cpu()
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
