"""Lazy training: the loss falls, and the features stay as they were."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, first_step
from gramscope.diagnose.rule_registry import CHANCE, MEASURES, TARGETS, rule
from gramscope.diagnose.thresholds import ENOUGH_STEPS, LAZY_FEATURES, LAZY_KERNEL

FEW = 5
LEARNT = 0.02  # of the loss, beyond what constant outputs reach, is gone
LESS = 0.5  # times this part: the kernel drift of a network whose features learn is at least as large as it
TRAINED = 0.5  # of the loss of the best constant outputs, or less, at the start: the network has learnt before
STILL, PART = 0.02, 0.1  # feature change, one minus the CKA with the features at the start; and times the part gone


@rule(
    "lazy",
    needs=((("kernel/drift",), MEASURES), (("loss/probe",), TARGETS), (("probe/chance",), CHANCE)),
    explains=("lr_too_small",),
    order=3,
)
def find(history: History) -> Finding | None:
    """The outputs learn and the network does not move: the kernel drift is less than half of the part of the loss gone.

    With ``f = α g(θ)`` a fall of the loss takes a movement of the parameters, and so of the kernel, that is smaller by
    ``1/α``: the lazy regime of Chizat, Oyallon & Bach (arXiv:1812.07956, section 1.1), by a large output scale or a
    width parametrisation under which features do not move (arXiv:2011.14522). In a run whose steps are merely short
    both are small, and the kernel moves the more: its drift is 0.9 to 10 times the part of the loss that is gone. Only
    what falls below the loss of the best constant outputs counts, since fitting a mean moves no features; a network
    that starts below half of it was trained before, and its features need not move. The features, by CKA, moved by less
    than 2 %, or than a tenth of the part of the loss that is gone. Every run that is named here is also lazy by the
    verdict of the report.
    """
    drift = history.get("kernel/drift").finite
    if len(drift) < FEW or drift.steps[-1] - drift.steps[0] < ENOUGH_STEPS or not drift.values[1:].all():
        return None  # a drift that is 0 again was measured anew, as after a restart
    loss = history.until(float(drift.steps[-1])).probe_loss.finite
    chance = history.value("probe/chance")
    if loss.first < TRAINED * chance:
        return None
    start = min(loss.first, chance)
    gone, moved = 1 - loss.last / start if start > 0 else np.nan, float(drift.values.max())
    similar = history.get("richness/initial_similarity").finite
    changed = 1 - float(similar.values.min()) if len(similar) else np.nan
    still = min(max(STILL, PART * gone), LAZY_FEATURES)
    if not (gone > LEARNT and moved < min(LESS * gone, LAZY_KERNEL)) or changed > still:
        return None
    evidence = [
        Evidence("part of the loss that is gone, below chance", gone, "above", LEARNT),
        Evidence("kernel/drift, greatest", moved, "below", min(LESS * gone, LAZY_KERNEL)),
    ]
    evidence += [] if np.isnan(changed) else [Evidence("feature change", changed, "below", still)]
    return Finding(
        "lazy",
        f"The features do not move: {100 * gone:.0f} % of the loss is gone, and the kernel drift is {moved:.2g}.",
        tuple(evidence),
        "The outputs are scaled up, or the width parametrisation keeps the features where they start.",
        "Lower the output scale (or the initial head) and raise the learning rate by its square, or use µP.",
        step=max(float(drift.steps[FEW - 1]), first_step(loss, lambda values: values < (1 - LEARNT) * start) or 0.0),
    )
