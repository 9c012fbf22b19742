"""A softmax or a sigmoid before a loss that has its own."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Numbers
from gramscope.diagnose.progress import end_of, later_part
from gramscope.diagnose.rule_registry import LABELS, LOSS, rule

NEAR = 0.1  # relative distance of the batches' loss from the probe's, by the same loss
SMALLER = 3.0  # over the number of classes: the batches' first gradients against the probe's
HARDER = 1.3  # times the loss of the probe
OFF = 0.1  # above what the accuracy allows the batches to cost
SLACK = 2e-3  # of rounding
FEW, FIRST = 8, 5


@rule(
    "softmax_twice",
    needs=((("outputs/probabilities", "yes_or_no/loss"), LABELS), (("batch loss",), LOSS), (("loss/probe",), LABELS)),
    explains=("labels", "lr_too_small", "clipping_always", "class_missing", "vanishing_signals", "lazy",
              "batch_too_small", "rank_collapse"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Cross-entropy of C numbers in [0, 1] that sum to one lies between ``log(e + C - 1) - 1`` and one above it.

    (Of a sigmoid: C = 2.) Every batch must lie there. Then one of three things: the outputs of the network are
    probabilities at every measurement, and the batches cost what the probe costs; or the softmax is in the loss, and
    the gradients of the first batches are smaller than the probe's, by the slope of a softmax, ``1/C``; or the
    batches cost 30 % more than the probe, and no more than the bound and the share of wrong answers explain. Outputs
    that are probabilities are right for a loss that takes their logarithm: it soon falls below the bound.
    """
    count = max(2.0, np.nan_to_num(history.value("probe/outputs"), nan=2.0))
    floor, losses = float(np.log(np.e + count - 1)) - 1, history.batch_loss.finite
    if len(history.steps) < FEW or len(losses) < 10:
        return None
    if losses.values.min() < floor - SLACK or losses.values.max() > floor + 1 + SLACK:
        return None
    told = history.get("outputs/probabilities").finite.values
    evidence = _of_the_network(history) if len(told) and told.all() else _of_the_loss(history, count, floor)
    if evidence is None:
        return None
    least = float(losses.values.min())
    return Finding(
        "softmax_twice",
        f"The loss is given probabilities in place of logits: no batch can cost less than {floor:.2g}.",
        (Evidence("least loss of a batch", least, "above", floor - SLACK), evidence),
        "A softmax or sigmoid comes before a loss that has its own (cross_entropy, binary_cross_entropy_with_logits).",
        "Leave out the softmax or sigmoid before the loss.",
        ("outputs",) if len(told) and told.all() else ("loss",),
        float(history.steps[FEW - 1]),
    )


def _of_the_network(history: History) -> Evidence | None:
    apart = abs(later_part(history.batch_loss.finite).median() / end_of(history.probe_loss) - 1)
    return Evidence("outputs/probabilities", 1.0, "equal to", 1.0) if apart < NEAR else None


def _of_the_loss(history: History, count: float, floor: float) -> Evidence | None:
    ratios, late = _first_ratios(history), later_part(history.batch_loss.finite).median()
    probe = end_of(history.probe_loss)
    if len(ratios) == FIRST and float(np.median(ratios)) < min(SMALLER / count, 0.5):
        return Evidence("gradients of batches / of the probe", float(np.median(ratios)), "below", SMALLER / count)
    allowed = floor + 1 - history.get("accuracy/probe").last + OFF
    if not HARDER * probe < late < allowed:
        return None
    return Evidence("loss of batches / of the probe", late / probe, "above", HARDER)


def _first_ratios(history: History) -> Numbers:
    """Gradients of the first batches against the probe's with the same weights; none where they are all clipped."""
    probe, batches = history.get("gradient_norm").finite, history.get("gradient_given").finite
    given = dict(zip(batches.steps.tolist(), batches.values.tolist(), strict=True))
    pairs = [(given[s + 1], own) for s, own in zip(probe.steps.tolist(), probe.values.tolist(), strict=True)
             if s + 1 in given and own > 0][:FIRST]  # fmt: skip
    sizes = np.array([size for size, _ in pairs])
    squared = history.has("yes_or_no/loss")  # then the probe's gradient is that of another loss
    if squared or not len(pairs) or np.ptp(sizes) < 1e-3 * sizes.max():
        return np.empty(0)
    return sizes / np.array([own for _, own in pairs])
