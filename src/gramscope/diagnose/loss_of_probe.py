"""Whether the probe is judged by the loss that the run is trained on."""

from dataclasses import replace

import numpy as np

from gramscope.diagnose.history import History, Series

APART = 2.0  # times the probe's: the loss of the batches, with the same weights;
NEAR = 1.2  # where the targets are the numbers 0 and 1, which binary cross-entropy takes as well
FIRST = 5  # measurements, at each of which this holds
OF_THE_LOSS = ("loss/probe", "train_mode/loss", "probe/chance", "step/")
YES_OR_NO = {"yes_or_no/loss": "loss/probe", "yes_or_no/accuracy": "accuracy/probe", "yes_or_no/chance": "probe/chance"}
MATCHES = 1.5  # times: batches and probe, by the same loss


CROSS_ENTROPY = (
    "the targets are the numbers 0 and 1, which the probe takes with their squared error; the loss of the batches is "
    "nearer to a cross-entropy. Pass whole numbers (y.long(), or y.argmax(1) of one-hot classes), or loss="
)


def loss_of_another_kind(history: History) -> str:
    """Why the loss on the probe is not the one that the run is trained on; empty where it may be."""
    known, other = by_the_loss_of_the_batches(history)
    return CROSS_ENTROPY if known is not history and not other else other


def by_the_loss_of_the_batches(history: History) -> tuple[History, str]:
    """The run with what can be compared with its batches, and why something was left out; empty where nothing was.

    Targets 0.0 and 1.0 are numbers to the watch, which also records their binary cross-entropy: where that lies nearer
    to the loss of the batches than the squared error does, and near to it or twice as near, it takes the place of that.
    """
    other = other_loss(history)
    squared, binary = (_apart(history, history.get(name)) for name in ("loss/probe", "yes_or_no/loss"))
    known = history.leaving_out(OF_THE_LOSS)
    if not (binary < min(squared, np.log(MATCHES)) or binary < squared / 2):
        return (known, other) if other else (history, "")
    taken = {new: history.get(old) for old, new in YES_OR_NO.items() if history.has(old)}
    return replace(known, measured={**known.measured, **taken}), ""


def _apart(history: History, probe: Series) -> float:
    """Median distance of the logarithms of the batches' and the probe's loss; NaN where there are few to compare."""
    pairs = np.array([pair for pair in same_weights(history.batch_loss, probe) if min(pair) > 0])
    return float(np.median(np.abs(np.diff(np.log(pairs), axis=1)))) if len(pairs) >= FIRST else np.nan


def same_weights(batches: Series, probe: Series) -> list[tuple[float, float]]:
    """Numbers of the batches and of the probe, with the same weights."""
    given = dict(zip(batches.steps.tolist(), batches.values.tolist(), strict=True))
    known = zip(probe.steps.tolist(), probe.values.tolist(), strict=True)
    return [(given[step + 1], own) for step, own in known if step + 1 in given]


def other_loss(history: History) -> str:
    """Why the two losses cannot be compared; empty where they can.

    The loss that is logged at step s + 1 and that of the probe at step s belong to the same weights. Untrained or not,
    a network finds batches as hard as held-out examples or easier. Where they cost twice as much from the first step
    on, they are measured by another loss: a sum over the batch, binary cross-entropy of targets that the watch took for
    numbers, or a loss with further terms.
    """
    probe = history.get("train_mode/loss") if history.has("train_mode/loss") else history.probe_loss
    known = same_weights(history.batch_loss, probe)[:FIRST]
    times = NEAR if history.value("probe/zero_or_one") == 1 else APART
    if len(known) < FIRST or probe.steps[0] > 0 or not all(batch > times * own > 0 for batch, own in known):
        return ""
    batch, own = np.array(known)[0].tolist()
    return (
        f"the batches are measured by another loss than the probe: {batch:.3g} against {own:.3g} before training. Pass "
        "loss= to gs.watch, labels 0 and 1 as whole numbers, or divide a summed loss by the size of the batch"
    )
