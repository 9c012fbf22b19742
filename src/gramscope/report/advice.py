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
        "The network keeps its initial features and fits its outputs on them, as a kernel machine would.",
        "If the network is good enough, nothing needs to be done. For more feature learning: a larger learning rate, a "
        "smaller output scale (or smaller initial weights in the last layer), µP in place of the standard "
        "parametrisation, or longer training.",
        "docs/is-it-lazy.md",
    ),
    "not learnt": Topic(
        "Not learnt",
        "The loss has hardly fallen, so the features do not tell how the network learns this task.",
        "Find out first why the loss does not fall.",
        "docs/my-run-does-not-learn.md",
    ),
    "rich": Topic(
        "Rich",
        "The task has changed the features, so the initial kernel does not describe the trained network.",
        "Nothing needs to be done. For a lazier run: a larger output scale or a smaller learning rate.",
        "docs/is-it-lazy.md",
    ),
    "in between": Topic(
        "Between lazy and rich",
        "The features changed, but the final kernel still resembles the initial one.",
        "A larger learning rate or a smaller output scale makes the run richer, the opposite lazier.",
        "docs/is-it-lazy.md",
    ),
    "overfitting": Topic(
        "Overfitting",
        "The network still fits its training examples better, but no longer improves on others.",
        "Stop at the step named here, or add data, augmentation or weight decay; or use a smaller network.",
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
        "First-order theory leaves out curvature and units that switch on or off. A large error means that the steps "
        "are large for this theory.",
        "To work with the kernel quantitatively, lower the learning rate. For training, a large error does no harm.",
        "docs/step-error.md",
    ),
    "target linearity": Topic(
        "Target linearity",
        "The R² of a linear map from the inputs of a layer to the targets. Compare it with its null, the value for "
        "random targets.",
        "If a layer is near its null, take a larger probe first.",
        "docs/target-linearity.md",
    ),
}
