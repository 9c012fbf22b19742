"""A softmax (or sigmoid) before a loss that has its own."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.loss_of_probe import same_weights
from gramscope.diagnose.rule_registry import LABELS, LOSS, MEASURES, rule

NEAR = 0.1  # of a loss whose values span one: what batches and probe may differ by
SLACK = 2e-3  # of rounding
FEW = 14  # measurements: single batches scatter


@rule(
    "softmax_twice",
    needs=((("outputs/probabilities", "yes_or_no/loss"), LABELS), (("batch loss",), LOSS),
           (("outputs/behind_softmax",), MEASURES)),
    explains=("labels", "lr_too_small", "clipping_always", "class_missing", "vanishing_signals", "lazy",
              "batch_too_small", "rank_collapse"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Cross-entropy of C numbers in [0, 1] that sum to one lies between ``log(e + C - 1) - 1`` and one above it.

    (Of a sigmoid: C = 2.) Every batch must lie there. And in the later half of the run the batches cost what the probe
    costs where its outputs are probabilities already, or, where they are not, what it costs behind one more softmax and
    not what it costs by itself (outputs/behind_softmax, at the same weights): the softmax is then in the loss. Outputs
    that are probabilities are right for a loss that takes their logarithm: it soon falls below the bound.
    """
    count = max(2.0, np.nan_to_num(history.value("probe/outputs"), nan=2.0))
    floor, losses = float(np.log(np.e + count - 1)) - 1, history.batch_loss.finite
    if len(history.steps) < FEW or len(losses) < 10:
        return None
    if losses.values.min() < floor - SLACK or losses.values.max() > floor + 1 + SLACK:
        return None
    own, behind = (_apart(history, history.get(name)) for name in ("loss/probe", "outputs/behind_softmax"))
    told = history.get("outputs/probabilities").finite.values
    of_outputs = len(told) > 0 and bool(told.all())
    if not (own < NEAR if of_outputs else behind < NEAR and own > max(NEAR, 2 * behind)):
        return None
    least = Evidence("least loss of a batch", float(losses.values.min()), "above", floor - SLACK)
    distance = "distance of the batches' loss from the probe's"
    return Finding(
        "softmax_twice",
        f"The loss is given probabilities in place of logits: no batch can cost less than {floor:.2g}.",
        (least, Evidence(distance, own, "below", NEAR)) if of_outputs
        else (least, Evidence(f"{distance} behind a softmax", behind, "below", NEAR),
              Evidence(distance, own, "above", max(NEAR, 2 * behind))),
        "A softmax or sigmoid comes before a loss that has its own (cross_entropy, binary_cross_entropy_with_logits).",
        "Leave out the softmax or sigmoid before the loss.",
        ("outputs",) if of_outputs else ("loss",),
        float(history.steps[FEW - 1]),
    )  # fmt: skip


def _apart(history: History, probe: Series) -> float:
    """Median distance of batches and probe with the same weights, in the later half; NaN where there is none."""
    pairs = np.array(same_weights(history, probe.finite))
    late = pairs[len(pairs) // 2 :]
    return abs(float(np.median(late[:, 0] - late[:, 1]))) if len(late) else float("nan")
