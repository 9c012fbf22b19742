"""Gradients that add up over the steps, because nobody sets them to zero."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.rule import OPTIMIZER, TARGETS, rule

OVERLAP = 0.9  # cosine of two gradients in a row: they share nearly all that was summed before
GROWTH = 4.0  # of the gradient given, against that of the probe, since the first steps
FEW = 5


@rule(
    "gradients_not_zeroed",
    needs=((("gradient_given",), OPTIMIZER), (("gradient_norm",), TARGETS)),
    explains=("lr_too_large", "dead_units", "loss_spikes", "saturated_units", "rank_collapse", "batch_too_small",
              "exploding_signals"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """The optimiser is given ``Σ_{s ≤ t} g_s`` instead of ``g_t``.

    Two such sums in a row point the same way (cosine ``gradient_overlap`` above 0.9), and they grow against the
    gradient of the probe by a factor of 4 and more. In full-batch training the first holds as well and the second does
    not; near a minimum the second may hold by noise, and the first does not. Neither depends on the scale of the loss.
    """
    given, probe, overlap = history.get("gradient_given"), history.get("gradient_norm"), history.get("gradient_overlap")
    shared = np.intersect1d(given.finite.steps, probe.finite.steps)
    if len(shared) < FEW or len(overlap.finite) < FEW:
        return None
    ratio = _at(given, shared) / np.maximum(_at(probe, shared), 1e-30)
    start, growth = float(np.median(ratio[:2])), float(np.median(ratio[-FEW:]))
    alike = float(np.median(overlap.finite.values[-max(FEW, len(overlap.finite) // 2) :]))
    if not (alike > OVERLAP and growth > GROWTH * start):
        return None
    return Finding(
        "gradients_not_zeroed",
        "The gradients given to the optimiser add up from step to step.",
        (
            Evidence("gradient_overlap", alike, "above", OVERLAP),
            Evidence("growth of gradient_given / gradient_norm", growth / start, "above", GROWTH),
        ),
        "optimizer.zero_grad() is not called, or is called for other parameters.",
        "Call optimizer.zero_grad() before every backward().",
        step=float(shared[FEW - 1]),
    )


def _at(series: Series, steps: np.ndarray) -> np.ndarray:
    return series.finite.values[np.isin(series.finite.steps, steps)]
