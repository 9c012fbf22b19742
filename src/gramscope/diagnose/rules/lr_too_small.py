"""A learning rate that is too small: the loss falls along a straight line, and there is far to go."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import LEARNT, later_half, removed
from gramscope.diagnose.rule_registry import OPTIMIZER, TARGETS, rule

STRAIGHT = 0.015  # first-order error of one step
SHORT = 5e-4  # of its norm a layer moves in one step
STILL = 1e-6  # of it: no step at all, as where a schedule has come to its end
FEW = 10  # measurements: before, momentum has not gathered speed


@rule(
    "lr_too_small",
    needs=((("loss/probe",), TARGETS), (("update_ratio/*",), OPTIMIZER)),
    explains=("class_missing", "labels", "rank_collapse"),
    order=2,
)
def find(history: History) -> Finding | None:
    """The optimiser's step is so short that the first-order prediction is nearly exact, and little was learnt.

    The error of first order grows with the length of the step, for any optimiser and any scale of the loss, so an
    error below 1.5 % leaves room for a step many times as long. More than half of the first loss is still there, it
    has not risen by half either, and layers move by less than 5e-4 of their norm in a step. Below 1e-6 of it, the rate
    is zero or a schedule has ended, and the error is not asked for.
    """
    gone, error = removed(history), later_half(history.get("step/error").finite)
    ratios = [later_half(s).median() for s in history.family("update_ratio").values() if len(s.finite)]
    if len(history.steps) < FEW or not ratios or not abs(gone) < LEARNT:
        return None
    moved = float(np.median(ratios))
    straight = len(error.finite) > 0 and error.median() < STRAIGHT
    if not (moved < SHORT and (straight or moved < STILL or not len(error.finite))):
        return None
    evidence = [Evidence("update_ratio, median", moved, "below", SHORT)]
    evidence += [Evidence("step/error, median", error.median(), "below", STRAIGHT)] if straight else []
    evidence += [Evidence("part of the first loss that is gone", gone, "below", LEARNT)]
    return Finding(
        "lr_too_small",
        f"The steps are very short: after {history.end:,.0f} steps {100 * max(gone, 0):.0f} % of the first loss is "
        "gone.",
        tuple(evidence),
        "The learning rate is too small, or a schedule has brought it down too early.",
        "Raise the learning rate by a factor of 100; halve it where the loss then jumps.",
        where=(f"lr {history.get('optimizer/lr').last:g}",) if history.has("optimizer/lr") else (),
        step=history.step_of(FEW - 1),
    )
