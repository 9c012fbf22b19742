"""A softmax (or sigmoid) before a loss that has its own."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.loss_of_probe import same_weights
from gramscope.diagnose.progress import later_part
from gramscope.diagnose.rule_registry import LABELS, LOSS, rule

NEAR = 0.1  # of a loss whose values span one: what batches and probe may differ by
SMALLER = 3.0  # over the number of classes: the batches' first gradients against the probe's
MOST = 0.5  # of them: where the classes are so few, wrong labels or small weights may do the same, if nothing is learnt
AS_LARGE = 0.75  # or more: no softmax is between, of which the slope is a half at most
SLACK = 2e-3  # of rounding
FEW, FIRST = 8, 5
ENOUGH = 14  # measurements, for the losses: single batches scatter


@rule(
    "softmax_twice",
    needs=((("probe/outputs", "outputs/probabilities", "yes_or_no/loss"), LABELS), (("batch loss",), LOSS)),
    explains=("labels", "lr_too_small", "clipping_always", "class_missing", "vanishing_signals", "lazy",
              "batch_too_small", "rank_collapse"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Cross-entropy of C numbers in [0, 1] that sum to one lies between ``log(e + C - 1) - 1`` and one above it.

    (Of a sigmoid: C = 2.) Every batch must lie there. Then one of three things: the outputs of the network are
    probabilities at every measurement, and the batches cost what the probe costs; or the softmax is in the loss, and
    the gradients of the first batches are smaller than the probe's, by the slope of a softmax, ``1/C``; or, in the
    last third, the batches cost what the probe costs behind one more softmax, and not what it costs by itself, and less
    than chance, where all of these meet (wrong labels may cost as much by accident, but their gradients are not small).
    Outputs that are probabilities are right for a loss that takes their logarithm: it soon falls below the bound.
    """
    count = max(2.0, np.nan_to_num(history.value("probe/outputs"), nan=2.0))
    floor, losses = float(np.log(np.e + count - 1)) - 1, history.batch_loss.finite
    if len(history.steps) < FEW or len(losses) < 10:
        return None
    if losses.values.min() < floor - SLACK or losses.values.max() > floor + 1 + SLACK:
        return None
    told = history.get("outputs/probabilities").finite.values
    of_outputs = len(told) > 0 and bool(told.all())
    evidence = _of_the_network(history) if of_outputs else _in_the_loss(history, count)
    if evidence is None:
        return None
    return Finding(
        "softmax_twice",
        f"The loss is given probabilities in place of logits: no batch can cost less than {floor:.2g}.",
        (Evidence("least loss of a batch", float(losses.values.min()), "above", floor - SLACK), evidence),
        "A softmax or sigmoid comes before a loss that has its own (cross_entropy, binary_cross_entropy_with_logits).",
        "Leave out the softmax or sigmoid before the loss.",
        ("outputs",) if of_outputs else ("loss",),
        history.step_of(FEW - 1),
    )


def _of_the_network(history: History) -> Evidence | None:
    apart = _apart(history, "loss/probe")
    return Evidence("loss of batches - loss of the probe", apart, "below", NEAR) if apart < NEAR else None


def _in_the_loss(history: History, count: float) -> Evidence | None:
    ratio, bound = _slope(history), min(SMALLER / count, MOST)
    few = bound == MOST and history.has("probe/outputs")  # a sigmoid cannot reach chance where ones are rare
    if ratio < bound and not (few and _below_chance(history) < NEAR / 2):
        return Evidence("gradients of batches / of the probe", ratio, "below", bound)
    return None if ratio > AS_LARGE else _by_cost(history)


def _by_cost(history: History) -> Evidence | None:
    own, behind = _apart(history, "loss/probe"), _apart(history, "outputs/behind_softmax")
    if len(history.steps) < ENOUGH or not (
        _below_chance(history) > NEAR and behind < NEAR and own > max(NEAR, 2 * behind)
    ):
        return None
    return Evidence("loss of batches - loss of the probe behind a softmax", behind, "below", NEAR)


def _below_chance(history: History) -> float:
    """How much less than chance the batches cost at the end."""
    return history.value("probe/chance") - later_part(history.batch_loss.finite).median()


def _apart(history: History, name: str) -> float:
    """Median distance of batches and probe with the same weights, in the last third; NaN where there is none."""
    pairs = np.array(same_weights(history.batch_loss, history.get(name).finite))
    late = pairs[2 * len(pairs) // 3 :]
    return abs(float(np.median(late[:, 0] - late[:, 1]))) if len(late) else float("nan")


def _slope(history: History) -> float:
    """The first gradients against the probe's with the same weights; NaN where all are clipped to one norm."""
    known = same_weights(history.get("gradient_given").finite, history.get("gradient_norm").finite)
    pairs = np.array([pair for pair in known if pair[1] > 0][:FIRST])
    squared = history.has("yes_or_no/loss")  # then the probe's gradient is that of another loss
    if squared or len(pairs) < FIRST or np.ptp(pairs[:, 0]) < 1e-3 * pairs[:, 0].max():
        return float("nan")
    return float(np.median(pairs[:, 0] / pairs[:, 1]))
