"""Gradients that add up over the steps, because nobody sets them to zero."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, together
from gramscope.diagnose.progress import later_half
from gramscope.diagnose.rule_registry import OPTIMIZER, TARGETS, rule

OVERLAP = 0.9  # cosine of two gradients in a row: they share nearly all that was summed before
GROWTH = 5.0  # of the gradient given, since the first steps
AGAINST = 2.0  # of the gradient given against that of the probe
FEW = 5


@rule(
    "gradients_not_zeroed",
    needs=((("gradient_given",), OPTIMIZER), (("gradient_norm",), TARGETS)),
    explains=("lr_too_large", "dead_units", "loss_spikes", "saturated_units", "rank_collapse", "batch_too_small",
              "exploding_signals", "labels", "class_missing", "memorization"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """The optimiser is given ``Σ_{s ≤ t} g_s`` instead of ``g_t``.

    Two such sums in a row point the same way (cosine ``gradient_overlap`` above 0.9, to the end), and they grow by a
    factor of 5 and more, also against the gradient of the probe. In full-batch training the first holds as well and the
    second does not; near a minimum the second may hold by noise, and the first does not. Neither depends on the scale
    of the loss.
    """
    shared, (sums, own) = together(history.get("gradient_given"), history.get("gradient_norm"))
    overlap = history.get("gradient_overlap").finite
    if len(shared) < FEW or len(overlap) < FEW:
        return None
    growth, ratio = _growth(sums), _growth(sums / np.maximum(own, 1e-30))
    alike = min(overlap.median(), later_half(overlap).median())
    if not (alike > OVERLAP and growth > GROWTH and ratio > AGAINST):
        return None
    return Finding(
        "gradients_not_zeroed",
        "The gradients given to the optimiser add up from step to step.",
        (
            Evidence("gradient_overlap", alike, "above", OVERLAP),
            Evidence("growth of gradient_given", growth, "above", GROWTH),
            Evidence("the same against gradient_norm", ratio, "above", AGAINST),
        ),
        "optimizer.zero_grad() is not called, or is called for other parameters.",
        "Call optimizer.zero_grad() before every backward().",
        step=float(shared[FEW - 1]),
    )


def _growth(sizes: np.ndarray) -> float:
    """The third greatest against the median of the first two: a single outlier is no growth."""
    return float(np.sort(sizes)[-3] / max(float(np.median(sizes[:2])), 1e-30))
