"""What engineers look at first: sizes of gradients, updates and weights by layer, dead units, noise and sharpness."""

import math
from collections.abc import Mapping

from torch import Tensor

from gramscope.capture.network import named_parameters
from gramscope.measures.loss_curvature import sharpness
from gramscope.measures.noise_scale import noise_and_signal
from gramscope.measures.norms import norms
from gramscope.record.condensed import rehearses_losses
from gramscope.record.moment import Moment
from gramscope.record.probe_pass import probe_pass
from gramscope.record.readings import Reading, reader, seconds
from gramscope.record.relu_units import dead_share
from gramscope.record.subject import layer_of

LANCZOS_STEPS = 10  # products with the Hessian


def norms_by_layer(sizes: Mapping[str, float]) -> dict[str, float]:
    """Norms of parameters as norms of their layers."""
    found: dict[str, float] = {}
    for name, size in sizes.items():
        found[layer_of(name)] = math.hypot(found.get(layer_of(name), 0.0), size)
    return found


@reader(
    "gradient",
    "Norm of the gradient of the probe's loss, of all weights and by layer; and its noise scale: batches of fewer "
    "examples than that have more noise than gradient.",
)
def read_gradient(moment: Moment) -> Reading:
    along = moment.along_loss
    sizes = {name: math.sqrt(square) for name, square in along.squares.items()}
    total, squares = math.hypot(*sizes.values()), along.example_squares
    found = {f"gradient_norm/{layer}": v for layer, v in norms_by_layer(sizes).items() if moment.subject.layers(layer)}
    found["gradient_norm"] = total
    if isinstance(squares, Tensor) and len(squares) > 1:
        n = len(squares)
        # The loss is a mean over examples: what one adds to the gradient is 1/n of its own.
        noise, signal = noise_and_signal(n**2 * squares, total**2)
        if signal > 0:  # else these examples are too few to show more than noise
            found["noise_scale"] = noise / signal
    return Reading(found)


@reader("weights", "Norm of the weights of each layer.", needs_targets=False, weights_only=True)
def read_weights(moment: Moment) -> Reading:
    named = named_parameters(moment.subject.model)
    sizes = norms_by_layer(norms({name: p for name, p in named.items() if p.is_floating_point()}))
    return Reading({f"weight_norm/{layer}": size for layer, size in sizes.items() if moment.subject.layers(layer)})


@reader(
    "update",
    "Size of the optimiser's last step against the weights (|Δθ|/|θ|) and against its gradient (|Δθ|/|g|), by layer.",
    needs_targets=False,
    ready=lambda subject: subject.last_update is not None,
    weights_only=True,
)
def read_update(moment: Moment) -> Reading:
    update = moment.subject.last_update
    assert update is not None
    reading = Reading()
    by_layer = update.sizes(moment.step)
    if by_layer:
        reading.scalars["update_size"] = math.hypot(*(sizes.update for sizes in by_layer.values()))
        reading.scalars["gradient_given"] = math.hypot(*(sizes.gradient for sizes in by_layer.values()))
    for layer, sizes in by_layer.items():
        if not moment.subject.layers(layer):
            continue
        if sizes.weight:
            reading.scalars[f"update_ratio/{layer}"] = sizes.update / sizes.weight
        if sizes.gradient:
            reading.scalars[f"effective_lr/{layer}"] = sizes.update / sizes.gradient
    return reading


@reader("dead_units", "Share of ReLU units that are zero on the whole probe, by layer.", needs_targets=False)
def read_dead_units(moment: Moment) -> Reading:
    found = {f"dead_units/{layer}": dead_share(masks) for layer, masks in moment.units.on_by_layer().items()}
    return Reading({name: share for name, share in found.items() if moment.subject.layers(name.partition("/")[2])})


@reader(
    "sharpness",
    "Greatest eigenvalue of the Hessian of the probe's loss; gradient descent is stable below 2 / learning rate.",
    guess=seconds(passes=3 * LANCZOS_STEPS),  # each product goes twice through the backward pass
    ready=lambda subject: not rehearses_losses(subject.judge),  # second derivatives of a vocabulary would not fit
)
def read_sharpness(moment: Moment) -> Reading:
    subject, y = moment.subject, moment.labels_or_values
    with probe_pass(subject) as f:
        free = [p for p in named_parameters(subject.model).values() if p.requires_grad and p.is_floating_point()]
        found = sharpness(subject.judge.loss(f, y.to(f.device)), free, steps=LANCZOS_STEPS)
    return Reading({"sharpness": found.value, "sharpness/error": found.error})
