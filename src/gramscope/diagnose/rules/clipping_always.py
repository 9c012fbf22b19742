"""Gradient clipping that is active at every step."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import OPTIMIZER, TARGETS, rule

SAME = 1e-3  # relative deviation of the norms
CUT = 3.0  # times the clip: the gradient of the probe
ALWAYS = 0.8
FEW = 6


@rule(
    "clipping_always",
    needs=((("gradient_given",), OPTIMIZER), (("gradient_norm",), TARGETS)),
    explains=("lr_too_small", "lazy"),
    order=1,
)
def find(history: History) -> Finding | None:
    """The gradients given have one and the same norm at four of five steps, and less than a third of the probe's.

    Then every step is a step of fixed length in the gradient's direction, and the learning rate means another thing.
    With Adam a constant factor changes little; so a clip is named only where the steps that it leaves do not learn, or
    the optimiser is not adaptive.
    """
    given, probe = history.get("gradient_given").finite, history.get("gradient_norm").finite
    if len(given) < FEW or not len(probe):
        return None
    clip = given.median()
    at_clip = np.abs(given.values - clip) <= SAME * clip
    share, ratio = float(at_clip.mean()), probe.median() / max(clip, 1e-30)
    if not (share >= ALWAYS and ratio > CUT) or history.value("optimizer/adaptive") == 1:
        return None
    return Finding(
        "clipping_always",
        f"Gradients are clipped to {clip:.3g} at {100 * share:.0f} % of steps; the probe has {ratio:.2g} times it.",
        (Evidence("share of gradients of one norm", share, "above", ALWAYS),
         Evidence("gradient_norm / clip", ratio, "above", CUT)),
        "max_norm lies far below the usual norm of the gradients.",
        f"Set max_norm to about {2 * probe.median():.1g}, so that only rare steps are clipped.",
        step=float(given.steps[FEW - 1]),
    )  # fmt: skip
