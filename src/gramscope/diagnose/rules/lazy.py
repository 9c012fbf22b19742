"""Lazy training: the loss falls, and the features stay as they were."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import removed
from gramscope.diagnose.rule import MEASURES, TARGETS, rule
from gramscope.diagnose.thresholds import LAZY_KERNEL

FEW = 5
LEARNT = 0.15  # of the first loss is gone
BEYOND = 0.9  # times the loss of chance: fitting the mean of the targets moves no features
STILL = 0.02  # feature change, one minus the CKA with the features at the start
MOVED = 0.1  # kernel drift


@rule(
    "lazy",
    needs=((("kernel/drift",), MEASURES), (("loss/probe",), TARGETS)),
    explains=("lr_too_small",),
    order=3,
)
def find(history: History) -> Finding | None:
    """The loss fell by 15 % or more while the tangent kernel moved by less than 10 %.

    The features, by CKA, moved by less than 2 %.
    This is the linear regime of Chizat, Oyallon & Bach (arXiv:1812.07956): a large output scale, or a width
    parametrisation under which features do not move (arXiv:2011.14522). These bounds are far below those that part lazy
    from rich runs in the report: many healthy runs are called lazy there, and learn well.
    """
    drift = history.get("kernel/drift").finite
    gone = removed(history.until(float(drift.steps[-1]))) if len(drift) else np.nan
    chance = history.value("probe/chance")
    beyond = not history.until(float(drift.steps[-1])).probe_loss.last > BEYOND * chance if len(drift) else False
    if len(drift) < FEW or not (gone > LEARNT and beyond):
        return None
    moved = float(drift.values.max())
    similar = history.get("richness/initial_similarity").finite
    changed = 1 - float(similar.values.min()) if len(similar) else np.nan
    if not moved < min(MOVED, LAZY_KERNEL) or changed > STILL:
        return None
    evidence = [Evidence("kernel/drift, greatest", moved, "below", MOVED)]
    evidence += [] if np.isnan(changed) else [Evidence("feature change", changed, "below", STILL)]
    return Finding(
        "lazy",
        f"The features do not move: {100 * gone:.0f} % of the loss is gone, and the kernel drift is {moved:.2g}.",
        (*evidence, Evidence("part of the first loss that is gone", gone, "above", LEARNT)),
        "The outputs are scaled up, or the width parametrisation keeps the features where they start.",
        "Lower the output scale (or the initial head) and raise the learning rate by its square, or use µP.",
        step=float(drift.steps[FEW - 1]),
    )
