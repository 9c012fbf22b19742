"""Readings of single theories: neural collapse, concentration of co-activation, the neural feature ansatz."""

from typing import Any

import torch
from torch import Tensor

from gramscope import measures
from gramscope.capture.network import named_parameters
from gramscope.hierarchy.mask_concentration import coactivation_rank, concentration
from gramscope.record.moment import Moment
from gramscope.record.probe_pass import probe_pass
from gramscope.record.readings import Reading, reader, seconds
from gramscope.record.relu_units import ReluUnits
from gramscope.record.subject import evaluating, layer_of, layers_by_id

TOP = 5  # dimension of the eigenspaces that are compared
_NO_CLASSES = "not defined: the probe must have one class for each example, and a linear layer that scores them."
_NO_FIRST_WEIGHTS = "not defined: the weights of the first measurement are not kept in the run's folder."


@reader("collapse", "Neural collapse of the last features, NC1 to NC4 and class-distance variance: 0 in full collapse.")
def read_collapse(moment: Moment) -> Reading:
    y, last = moment.labels_or_values, moment.last
    one_label_each = not y.is_floating_point() and y.numel() == len(y) and moment.subject.judge.kind == "classes"
    if last is None or last not in moment.features or not one_label_each:
        return Reading()  # numbers or positions: there is nothing that could collapse
    form = measures.weight_forms(moment.subject.model).get(last)
    weight = None if form is None else form.form.matrices(named_parameters(moment.subject.model)[last])[0]
    features, labels = moment.features[last], y.reshape(-1)
    counted = (labels >= 0).to(features.device)
    if len(labels[labels >= 0].unique()) < 2:
        return Reading(missing={"collapse": _NO_CLASSES})
    rows = (features[counted], labels.to(features.device)[counted], moment.f[counted])
    found = measures.neural_collapse(*rows, weight=weight)
    names = ("nc1", "nc2", "nc3", "nc4", "cdnv")
    values = {f"collapse/{name}": getattr(found, name) for name in names}
    return Reading({name: value for name, value in values.items() if value is not None})


@reader(
    "concentration",
    "Participation ratio of co-activation and of the pullback metric, by layer, and whether the weights follow it.",
    needs_targets=False,
    by_default=False,
    guess=seconds(passes=1, eigenvalues=2),
)
def read_concentration(moment: Moment) -> Reading:
    units = ReluUnits(layers_by_id(moment.subject.model), by_example=True)
    with probe_pass(moment.subject, units):
        pass
    weights = _matrices(moment)
    if moment.memory.weights is None and not moment.memory.resumed:
        moment.memory.weights = {name: weight.clone() for name, weight in weights.items()}
    reading = Reading()
    for layer, masks in units.on_by_layer().items():
        if moment.subject.layers(layer) and len(masks) == 1:
            reading.scalars |= _concentration(moment, layer, masks[0], weights.get(layer))
    if moment.memory.weights is None:
        reading.missing["update_alignment"] = _NO_FIRST_WEIGHTS
    return reading


def _matrices(moment: Moment) -> dict[str, Tensor]:
    """The weight of each layer that is one matrix."""
    named, found = named_parameters(moment.subject.model), {}
    for name, weight in measures.weight_forms(moment.subject.model).items():
        matrices = weight.form.matrices(named[name])
        if len(matrices) == 1:
            found[layer_of(name)] = matrices[0].cpu()
    return found


def _concentration(moment: Moment, layer: str, mask: Tensor, weight: Tensor | None) -> dict[str, float]:
    mask = mask.cpu()
    if weight is None or len(weight) != mask.shape[1]:
        ranks = coactivation_rank(mask), coactivation_rank(mask, center=True)
        return {f"coactivation_rank/{layer}": ranks[0], f"coactivation_rank_centred/{layer}": ranks[1]}
    start = None if moment.memory.weights is None else moment.memory.weights.get(layer)
    moved = start is not None and start.shape == weight.shape and not torch.equal(start, weight)
    (found,) = concentration([weight], [mask], initial_weights=[start] if moved and start is not None else None, k=TOP)
    values: dict[str, Any] = {
        f"coactivation_rank/{layer}": found.coactivation_rank,
        f"coactivation_rank_centred/{layer}": found.centred_rank,
        f"metric_rank/{layer}": found.metric_rank,
    }
    if found.alignment is not None:
        values[f"update_alignment/{layer}"] = found.alignment.overlap
    return values


@reader(
    "ansatz",
    "Neural feature ansatz: correlation of WᵀW with the root of the average gradient outer product, by weight.",
    needs_targets=False,
    by_default=False,
    guess=seconds(passes=2),
)
def read_ansatz(moment: Moment) -> Reading:
    subject = moment.subject
    with evaluating(subject.model):
        found = measures.neural_feature_ansatz(subject.model, subject.x, outputs=subject.outputs)
    return Reading({f"ansatz/{name}": value for name, value in found.items() if subject.layers(layer_of(name))})
