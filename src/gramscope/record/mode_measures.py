"""Measured over training: modes of the last features, and how many directions the states can move in."""

import math

from gramscope import measures
from gramscope.propagators import GlobalNTK, participation_ratio, structural_rank_bound
from gramscope.record.measurement import Measurement
from gramscope.record.subject import evaluating
from gramscope.record.watched_measures import _NO_LAST, MeasuredValues, seconds, watched_measure

_FEW = "not defined: half of the probe must be more examples than the last layer has inputs. Take a larger probe."
PRODUCTS = 8  # random vectors of an estimated rank


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
    outputs = measurement.output_rows
    features, targets = measurement.along_loss.features[last][: len(outputs)], measurement.targets[: len(outputs)]
    half = len(outputs) // 2
    if half <= features.shape[1]:
        return MeasuredValues(missing={"modes": _FEW})
    curves = measures.richness_curves(features[:half], features[half:], targets[half:], outputs[half:])
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
