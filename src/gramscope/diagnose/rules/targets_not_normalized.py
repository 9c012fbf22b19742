"""Targets of a regression far from the size of the outputs."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import end_of
from gramscope.diagnose.rule_registry import NOT_NEEDED, rule

LARGE = 10.0  # root mean square, and times that of the outputs before training
OFF = 10.0  # mean against deviation
LEFT = 0.5  # of the loss of the best constant, or more


@rule(
    "targets_not_normalized",
    needs=((("probe/targets_rms",), f"{NOT_NEEDED}the targets are no numbers, or the loss= is your own"),),
    explains=("lr_too_small", "lr_too_large", "labels", "lazy", "loss_spikes", "batch_too_small", "clipping_always",
              "dead_units", "saturated_units", "head_only", "rank_collapse", "vanishing_signals"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Targets ten times as large as the outputs at the start, or with a mean of ten deviations; little is learnt.

    Outputs start near zero with a size of about one, and a step of Adam moves them by a part of that: targets of some
    hundreds take that many more steps. With SGD the gradient grows with the target, and the loss may diverge. A mean
    of ten deviations makes 99 % of the loss the mean's. A run that left half of the variance behind is left alone.
    """
    size, outputs = history.value("probe/targets_rms"), history.value("outputs/rms")
    chance, mean = history.value("probe/chance"), history.value("probe/targets_mean")
    off = mean / float(np.sqrt(chance)) if chance > 0 else np.nan
    evidence = []
    if size > LARGE and size > LARGE * np.nan_to_num(outputs):
        evidence.append(Evidence("probe/targets_rms", size, "above", LARGE * max(1.0, float(np.nan_to_num(outputs)))))
    if off > OFF:
        evidence.append(Evidence("mean of the targets / deviation", off, "above", OFF))
    if not evidence or end_of(history.loss) < LEFT * chance:
        return None
    return Finding(
        "targets_not_normalized",
        f"The targets have a root mean square of {size:.3g}"
        + ("." if np.isnan(off) else f" and a mean of {off:.2g} standard deviations."),
        tuple(evidence),
        "The targets are not normalised (raw units): the outputs have far to go.",
        "Subtract the mean of the training targets and divide by their standard deviation.",
        ("targets",),
    )
