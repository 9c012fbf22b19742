"""What a finding means and what one could do about it; each topic names the page of the docs that argues it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """What the page explains once, at its end; findings link to it."""

    title: str
    means: str
    todo: str
    page: str


@dataclass(frozen=True)
class Finding:
    """One sentence about a run; ``topic`` is a key of :data:`TOPICS`, or empty where nothing is to be explained."""

    text: str
    topic: str = ""


TOPICS = {
    "lazy": Topic(
        "Lazy",
        "The network keeps the features of its start and fits its outputs on them, as a kernel machine would.",
        "For more feature learning: a larger learning rate, a smaller output scale (or a smaller start of the last "
        "layer), µP in place of the standard parametrisation, or longer training.",
        "docs/calibration.md",
    ),
    "rich": Topic(
        "Rich",
        "The task has changed the features, so the kernel at the start does not describe the trained network.",
        "Nothing needs to be done. For a lazier run: a larger output scale or a smaller learning rate.",
        "docs/calibration.md",
    ),
    "in between": Topic(
        "Between lazy and rich",
        "The features moved, but the kernel of the start still resembles that of the end.",
        "A larger learning rate or a smaller output scale makes the run richer, the opposite lazier.",
        "docs/calibration.md",
    ),
    "diverged": Topic(
        "Diverged",
        "From one step on the numbers are not finite or far too large, and nothing measured later means anything.",
        "Lower the learning rate by a factor of 3 to 10, or add a warm-up or gradient clipping; look for bad data in "
        "the batch of the step that is named.",
        "docs/watch.md",
    ),
    "idle layer": Topic(
        "A layer that does not learn",
        "The gradient of this layer takes almost no part in the decrease of the loss.",
        "Look for dead units, saturated activations, a learning rate or an initial scale that is too small, or weights "
        "that are frozen by mistake. If it is meant to be so, freeze the layer: that saves time.",
        "docs/kernels.md",
    ),
    "head": Topic(
        "The last layer does the learning",
        "The last layer has nearly the whole share in the decrease of the loss, as in a linear fit on fixed features.",
        "Of a pretrained network this is often what one wants; freeze the rest to save time. Else the remedies of a "
        "lazy run apply: a larger learning rate for the lower layers, a smaller start of the last layer, µP.",
        "docs/kernels.md",
    ),
    "overfitting": Topic(
        "Overfitting",
        "The network goes on to fit its training examples after it has stopped to improve on others.",
        "Stop at the step that is named, or add data, augmentation or weight decay; or take a smaller network.",
        "docs/report.md",
    ),
    "grokking": Topic(
        "Grokking",
        "The network fitted the training examples long before it generalised.",
        "Do not stop such a task early. More weight decay or a smaller output scale often brings the change forward.",
        "docs/richness.md",
    ),
    "first order": Topic(
        "First-order theory",
        "The tangent kernel predicts a step up to curvature and units that switch; a large error means that steps are "
        "large for this theory.",
        "For quantitative work with the kernel take a smaller learning rate; for training it is no fault.",
        "docs/hierarchy.md",
    ),
    "target linearity": Topic(
        "Target linearity",
        "How much of the targets a linear map gives from the inputs of a layer. It is worth something only above its "
        "null, which random targets reach.",
        "If a layer is near its null, take a larger probe before you read it.",
        "docs/target-linearity.md",
    ),
    "dead units": Topic(
        "Dead units",
        "These units are off for every example of the probe, so they pass no gradient and cannot come back.",
        "Lower the learning rate or add a warm-up; a leaky activation or a normalisation layer before it keeps units "
        "alive.",
        "docs/report.md",
    ),
}
