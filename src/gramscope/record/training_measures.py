"""What engineers look at first: sizes of gradients, updates and weights by layer, dead units, noise and sharpness."""

import math
from collections.abc import Mapping

from torch import Tensor

from gramscope.capture.network import named_parameters
from gramscope.measures.loss_curvature import sharpness
from gramscope.measures.noise_scale import noise_and_signal
from gramscope.record.condensed import rehearses_losses
from gramscope.record.measurement import Measurement
from gramscope.record.probe_pass import probe_pass
from gramscope.record.relu_units import dead_share, left_out
from gramscope.record.subject import layer_of
from gramscope.record.watched_measures import MeasuredValues, seconds, watched_measure

_IDLE = (
    "the optimiser that was shown to the watch has taken no step for three measurements: it was replaced, or its "
    "step() is not what moves the model. Show the one in use: scope.use(optimizer)."
)
LANCZOS_STEPS = 10  # products with the Hessian


def norms_by_layer(sizes: Mapping[str, float]) -> dict[str, float]:
    """Norms of parameters as norms of their layers."""
    found: dict[str, float] = {}
    for name, size in sizes.items():
        found[layer_of(name)] = math.hypot(found.get(layer_of(name), 0.0), size)
    return found


@watched_measure(
    "gradient",
    "Norm of the gradient of the probe's loss, of all weights and by layer; and its noise scale: batches of fewer "
    "examples than that have more noise than gradient.",
)
def measure_gradient(measurement: Measurement) -> MeasuredValues:
    along = measurement.along_loss
    sizes = {name: math.sqrt(square) for name, square in along.squares.items()}
    total, squares = math.hypot(*sizes.values()), along.example_squares
    found = measurement.subject.by_layer("gradient_norm", norms_by_layer(sizes)) | {"gradient_norm": total}
    if isinstance(squares, Tensor) and len(squares) > 1:
        n = len(squares)
        # The loss is a mean over examples: what one adds to the gradient is 1/n of its own.
        noise, signal = noise_and_signal(n**2 * squares, total**2)
        if signal > 0:  # else these examples are too few to show more than noise
            found["noise_scale"] = noise / signal
    return MeasuredValues(found)


@watched_measure("weights", "Norm of the weights of each layer.", needs_targets=False, weights_only=True)
def measure_weights(measurement: Measurement) -> MeasuredValues:
    return MeasuredValues(measurement.subject.by_layer("weight_norm", norms_by_layer(measurement.weight_norms)))


@watched_measure(
    "update",
    "Size of the optimiser's last step against the weights (|Δθ|/|θ|) and against its gradient (|Δθ|/|g|), by layer.",
    needs_targets=False,
    ready=lambda subject: subject.updates is not None,
    weights_only=True,
)
def measure_update(measurement: Measurement) -> MeasuredValues:
    watched = measurement.subject.updates
    assert watched is not None
    measured = MeasuredValues()
    by_layer = watched.updates(measurement.step)
    if by_layer:
        measured.scalars["update_size"] = math.hypot(*(sizes.update for sizes in by_layer.values()))
        measured.scalars["gradient_given"] = math.hypot(*(sizes.gradient for sizes in by_layer.values()))
    ratios = {layer: sizes.update / sizes.weight for layer, sizes in by_layer.items() if sizes.weight}
    rates = {layer: sizes.update / sizes.gradient for layer, sizes in by_layer.items() if sizes.gradient}
    named = measurement.subject.by_layer
    measured.scalars |= named("update_ratio", ratios) | named("effective_lr", rates)
    if watched.is_idle():
        measured.missing["update"] = _IDLE
    return measured


@watched_measure("dead_units", "Share of ReLU units that are zero on the whole probe, by layer.", needs_targets=False)
def measure_dead_units(measurement: Measurement) -> MeasuredValues:
    found = {layer: dead_share(masks) for layer, masks in measurement.units.on_by_layer().items()}
    missing = left_out("dead_units", measurement.units.unseen_relus)
    return MeasuredValues(measurement.subject.by_layer("dead_units", found), missing=missing)


@watched_measure(
    "sharpness",
    "Greatest eigenvalue of the Hessian of the probe's loss; gradient descent is stable below 2 / learning rate, with "
    "momentum β below 2 (1 + β) / learning rate.",
    guess=seconds(passes=3 * LANCZOS_STEPS),  # each product goes twice through the backward pass
    ready=lambda subject: not rehearses_losses(subject.objective),  # second derivatives of a vocabulary would not fit
)
def measure_sharpness(measurement: Measurement) -> MeasuredValues:
    subject, y = measurement.subject, measurement.labels_or_values
    with probe_pass(subject) as f:
        free = [p for p in named_parameters(subject.model).values() if p.requires_grad and p.is_floating_point()]
        found = sharpness(subject.objective.loss(f, y.to(f.device)), free, steps=LANCZOS_STEPS)
    return MeasuredValues({"sharpness": found.value, "sharpness/error": found.error})
