"""Batches so small that noise outweighs the gradient."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule import LOSS, OPTIMIZER, rule

OVERLAP = 0.1  # cosine of two gradients in a row
ROUGH = 0.7  # deviation of neighbouring batch losses, against their mean
FEW = 8


@rule(
    "batch_too_small",
    needs=((("gradient_overlap",), OPTIMIZER), (("batch loss",), LOSS)),
    explains=("loss_spikes", "rank_collapse"),
    order=2,
)
def find(history: History) -> Finding | None:
    """Two gradients in a row have little in common, and neither have two losses, in the first part of the run.

    The cosine of two gradients of batches of B examples is ``|G|² / (|G|² + tr Σ / B)`` on average: one half at the
    noise scale (McCandlish et al., arXiv:1812.06162). At the end of training it falls in every run; so the
    early half of the measurements counts. The deviation of neighbouring losses against their mean is about 0.2 for
    batches of 64 and about 1 for single examples.
    """
    overlap, losses = history.get("gradient_overlap").finite, history.batch_loss.finite
    if len(overlap) < FEW or len(losses) < 20:
        return None
    early = float(np.median(overlap.values[: max(FEW, len(overlap) // 2)]))
    values = losses.values[: max(20, len(losses) // 2)]
    rough = float(np.median(np.abs(np.diff(values)))) / max(float(np.median(np.abs(values))), 1e-30)
    if not (early < OVERLAP and rough > ROUGH):
        return None
    return Finding(
        "batch_too_small",
        "The batches are too small: two gradients in a row have next to nothing in common.",
        (Evidence("gradient_overlap, early median", early, "below", OVERLAP),
         Evidence("change of the loss from batch to batch", rough, "above", ROUGH)),
        "The batch has far fewer examples than the gradient noise scale.",
        "Take 8 to 32 times as many examples in a batch, or accumulate gradients; or lower the learning rate.",
        step=float(overlap.steps[FEW - 1]),
    )  # fmt: skip
