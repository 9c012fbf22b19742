"""What a sentence of the page means, and what one could do; each topic names the page of the docs that argues it.

Where the diagnosis names a cause, its remedy stands alone: the page then leaves out what one could do otherwise.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """``means`` is always said, ``todo`` of runs in which nothing wrong was found."""

    title: str
    means: str
    todo: str
    page: str


@dataclass(frozen=True)
class Sentence:
    """One sentence about a run; ``topic`` is a key of :data:`TOPICS`, or empty where nothing is to be explained."""

    text: str
    topic: str = ""


TOPICS = {
    "lazy": Topic(
        "Lazy",
        "The network keeps the features of its start and fits its outputs on them, as a kernel machine would.",
        "For more feature learning: a larger learning rate, a smaller output scale (or a smaller start of the last "
        "layer), µP in place of the standard parametrisation, or longer training.",
        "docs/is-it-lazy.md",
    ),
    "rich": Topic(
        "Rich",
        "The task has changed the features, so the kernel at the start does not describe the trained network.",
        "Nothing needs to be done. For a lazier run: a larger output scale or a smaller learning rate.",
        "docs/is-it-lazy.md",
    ),
    "in between": Topic(
        "Between lazy and rich",
        "The features moved, but the kernel of the start still resembles that of the end.",
        "A larger learning rate or a smaller output scale makes the run richer, the opposite lazier.",
        "docs/is-it-lazy.md",
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
        "docs/step-error.md",
    ),
    "target linearity": Topic(
        "Target linearity",
        "How much of the targets a linear map gives from the inputs of a layer. It is worth something only above its "
        "null, which random targets reach.",
        "If a layer is near its null, take a larger probe before you read it.",
        "docs/target-linearity.md",
    ),
}
