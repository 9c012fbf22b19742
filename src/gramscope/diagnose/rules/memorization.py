"""The training examples are learnt, and nothing else yet: grokking in progress, or labels that mean nothing."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import end_of, removed_in_batches
from gramscope.diagnose.rule_registry import LOSS, TARGETS, rule

FITTED = 0.5  # of the batches' loss is gone,
BELOW = 0.5  # and so much of the loss of chance is left at most, while the probe costs
WORSE = 1.2  # times it, or more: what is learnt of the batches does harm there
NOTHING = 0.05  # of the loss of chance, or less, is left to the batches,
HALF = 0.5  # and so much of it, or more, to the probe
SMOOTH = 0.9  # of the steps lower the loss of the batches: the same examples each time
FEW = 6


@rule("memorization", needs=((("loss/probe",), TARGETS), (("batch loss",), LOSS)), order=4)
def find(history: History) -> Finding | None:
    """Half of the batches' loss is gone, and the probe costs 20 % more than the best constant outputs.

    At most half of the loss of these is left to the batches: targets far from zero have a first loss next to which
    their variance is nothing, and a run that has only found their mean has learnt no example. Or next to nothing (5 %)
    is left to the batches, and half of it to the probe. With a loss of one's own, whose best constant is not known, the
    probe's first loss takes its place: the batches are learnt, and the probe costs more than before training. The probe
    costs so much in both modes: where it does in evaluation mode alone, it is the means of batch norm that are wrong.
    So far this is what grokking looks like before it generalises (Power et al., arXiv:2201.02177); labels without a
    rule look the same. What may tell them apart is whether the inputs are tokens. Where the loss of the batches falls
    at nearly every step, each batch holds the same examples.
    """
    known = history.has("probe/chance")
    probe = float(np.fmin(end_of(history.probe_loss), end_of(history.get("train_mode/loss"))))
    fitted, chance = removed_in_batches(history), history.value("probe/chance") if known else history.probe_loss.first
    left = end_of(history.batch_loss) / max(chance, 1e-30)
    learnt = fitted > FITTED and left < BELOW and probe > WORSE * chance
    if len(history.steps) < FEW or not (learnt or (known and left < NOTHING and probe > HALF * chance)):
        return None
    same = _falls_at_each_step(history)
    return Finding(
        "memorization",
        f"The training examples are learnt, but on the probe the loss is {probe / max(chance, 1e-30):.2g} times that "
        "of chance.",
        (Evidence("loss of the batches against chance", left, "below", BELOW if learnt else NOTHING),
         Evidence("loss/probe against chance", probe / max(chance, 1e-30), "above", WORSE if learnt else HALF)),
        "The same few examples are shown at every step." if same
        else "The network memorises: few examples, or a rule that it finds late (grokking).",
        "Look whether each batch holds other examples: the loss falls too evenly for that." if same
        else "Go on training with more weight decay (try 1.0 with AdamW), and with more training examples if there are "
        "any.",
        alternatives=("few training examples, all in every batch", "a probe of other data") if same
        else ("labels that do not belong to their inputs", "the same batch at every step", "a probe of other data"),
        step=history.step_of(FEW - 1),
    )  # fmt: skip


def _falls_at_each_step(history: History) -> bool:
    """Whether the batches' loss falls at nine of ten steps while it falls to a tenth: other examples would be noise."""
    values = history.batch_loss.finite.values
    fall = values[: int(np.argmax(values < 0.1 * values[0])) + 1]
    return len(fall) > FEW and float((np.diff(fall) < 0).mean()) > SMOOTH
