"""Labels that do not belong to their inputs: shuffled, or many of them wrong."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.loss_of_probe import same_weights
from gramscope.diagnose.progress import LEARNT, at, end_of, falls, later_half, later_part, removed_in_batches
from gramscope.diagnose.rule_registry import CHANCE, LOSS, TARGETS, rule

UNRELATED = 0.1  # agreement of nearest neighbours above chance
RELATED = 0.3
CONSTANT = 0.97  # of the loss of the best constant outputs, or more: nothing is learnt beyond them
HARDER = 1.3  # times the loss of the probe, in the mode of training, of batches that have half of chance left;
MOST, SOMEWHAT = 0.7, 1.15  # or this, of classes with most of it left (100 squared errors are known to 14 % only),
ERRORS = 3.0  # and so many standard errors of the batches above it
WRONG = 0.5  # times the accuracy of chance,
LAST = 3  # in the median of so many measurements
STUCK = 0.3  # of the batches' first loss is gone, at most
LEVEL = 0.985  # the last quarter of the batches against the quarter before: it does not fall
PLATEAU = 0.08  # relative distance from the loss of chance
MOVING = 1e-3  # of its norm a layer moves in one step
PATH = 1.0  # of its norm a layer has moved in all steps, if they went one way,
STARTED = 0.5  # and where neighbours do not agree either
BATCHES = 40  # before a level is told
LEFT = 0.5  # of the loss of chance
NOISE = 0.8  # cosine of two gradients in a row, at most: unrelated targets leave noise
ABOVE = 1.2  # times the loss of chance: the probe
BELOW = 0.9  # times it: the batches,
KEPT = 0.3  # and so much of it at least: they are not memorised,
SLOW = 0.9  # nor on the way to that: last quarter against the one before
FEW, FIRST, PARTS = 8, 5, 10


@rule(
    "labels",
    needs=((("loss/probe",), TARGETS), (("batch loss",), LOSS), (("probe/chance",), CHANCE)),
    explains=("batch_too_small", "lr_too_small", "rank_collapse", "memorization", "class_missing"),
    order=3,
)
def find(history: History) -> Finding | None:
    """Five signs, each with what makes it one:

    1. The probe's labels have nothing to do with its inputs: the nearest neighbour of an example shares its label no
       more often than chance allows, and the probe's loss is no better than the best constant and falls no more.
       Gradients that agree from batch to batch are no noise: that is a plateau, here and in 3.
    2. The batches are harder than held-out examples: their loss stays 30 % above the probe's (in the mode of training,
       so dropout does not count; where it should and was not measured, this is not judged), or 15 % where most of the
       loss of chance is left of classes; and did not before training, so that neither a factor of the loss nor a term
       that is added to it counts. Fresh examples cannot be easier, unless training examples have wrong labels.
    3. The labels of the probe do belong to its inputs (of labels for positions this is not known), and both losses
       stay at that of the best constant outputs from first to last, or fall towards it from above, though the weights
       move: the network was shown other labels. Faults of the network or of the steps explain this better, where they
       are found.
    4. The labels of the probe do belong to its inputs, the batches are learnt by half, and the probe is named right in
       less than half as many examples as by chance: what is learnt is another code of the same labels.
    5. The batches are learnt in part and no further, and the probe's loss was never below that of the best constant
       outputs and has risen 20 % above it: what is learnt of the batches is another task, such as targets one
       position too late. Memorising would go on.
    """
    if len(history.steps) < FEW or len(history.batch_loss.finite) < BATCHES or not len(history.probe_loss.finite):
        return None
    if not history.value("probe/chance") > 0:
        return None
    return (
        _unrelated(history)
        or _harder(history)
        or _other_code(history)
        or _other_task(history)
        or _other_labels(history)
    )


def _unrelated(history: History) -> Finding | None:
    agree, chance = history.value("probe/neighbors_agree"), history.value("probe/chance")
    loss = history.probe_loss.finite.values
    best, lowest_now = float(loss.min()), loss[-1] < 0.99 * loss[:-1].min(initial=np.inf)
    fitted = history.value("probe/discrete") == 1 and removed_in_batches(history) > STUCK
    if (
        fitted
        or lowest_now
        or falls(history)
        or _overlap(history) > NOISE
        or not _moved(history) * history.end > STARTED
        or not (agree < UNRELATED and best > CONSTANT * chance)
    ):
        return None
    return Finding(
        "labels",
        "The labels have nothing to do with the inputs: neighbours do not share them, and the probe is not learnt.",
        (Evidence("probe/neighbors_agree", agree, "below", UNRELATED),
         Evidence("least loss/probe against chance", best / chance, "above", CONSTANT)),
        "Labels were shuffled against their inputs, or belong to another file or order.",
        "Look at ten examples with their labels; check that inputs and labels are shuffled together.",
        alternatives=("a task that no neighbour tells (modular arithmetic): then see memorization",),
        step=history.step_of(FEW - 1),
    )  # fmt: skip


def _harder(history: History) -> Finding | None:
    if history.has("training_mode") and not history.has("train_mode/loss"):
        return None  # what dropout costs is not known
    chance, late = history.value("probe/chance"), later_part(history.batch_loss.finite)
    easier = history.get("train_mode/loss") if history.has("train_mode/loss") else history.probe_loss
    probe, batches = at(easier.finite, float(np.median(late.steps))), late.median()
    first = [(batch / own, batch - own) for batch, own in same_weights(history.batch_loss, easier)[:FIRST] if own > 0]
    factor, term = np.median(first, axis=0).tolist() if first else (1.0, 0.0)
    ratio = min(batches / max(1.0, factor), batches - max(0.0, term)) / max(probe, 1e-30)
    error = 1.25 * float(np.std(late.values)) / len(late) ** 0.5  # of a median
    bound = SOMEWHAT if batches > MOST * chance and history.has("probe/classes") else HARDER
    if not (ratio > bound and batches > LEFT * chance and batches - probe > ERRORS * error):
        return None
    return Finding(
        "labels",
        f"The training batches stay harder than the probe: loss {batches:.2g} against {probe:.2g}.",
        (Evidence("loss of batches / loss of the probe", ratio, "above", bound),
         Evidence("loss of batches / loss of chance", batches / chance, "above", LEFT)),
        "Many labels of the training examples are wrong.",
        "Look at the training examples with the greatest loss, and correct or leave out wrong labels.",
        alternatives=(
            "strong augmentation or regularisation inside the training loss",
            "a softmax before a loss that has its own",
        ),
        step=history.step_of(FEW - 1),
    )  # fmt: skip


def _other_code(history: History) -> Finding | None:
    last = history.get("accuracy/probe").finite.values[-LAST:]
    right = float(np.median(last)) * history.value("probe/classes") if len(last) else np.nan
    fitted, agree = removed_in_batches(history), history.value("probe/neighbors_agree")
    if not (right < WRONG and fitted > LEARNT and agree > RELATED):
        return None
    return Finding(
        "labels",
        "The batches are learnt, and the probe is named wrong more often than by chance.",
        (Evidence("accuracy/probe against chance", right, "below", WRONG),
         Evidence("part of the batches' first loss that is gone", fitted, "above", LEARNT)),
        "The labels of the training examples have another code than those of the probe: shifted, flipped or permuted.",
        "Print the labels of both beside their inputs, and make them by the same code.",
        step=history.step_of(FEW - 1),
    )  # fmt: skip


def _moved(history: History) -> float:
    """What a layer moves in one step, against its norm."""
    return float(np.median([*history.medians("update_ratio").values()] or [0.0]))


def _overlap(history: History) -> float:
    """The cosine of two gradients in a row, in the later half."""
    return later_half(history.get("gradient_overlap").finite).median()


def _level(history: History) -> float:
    """The last quarter of the batches' loss against the quarter before."""
    values = history.batch_loss.finite.values
    quarter = len(values) // 4
    return float(np.median(values[-quarter:])) / max(float(np.median(values[-2 * quarter : -quarter])), 1e-30)


def _other_task(history: History) -> Finding | None:
    chance, probe = history.value("probe/chance"), history.probe_loss.finite
    batches, best = end_of(history.batch_loss) / chance, float(probe.values.min()) / chance
    if not (KEPT < batches < BELOW and best > 0.95 and probe.last > ABOVE * chance and _level(history) > SLOW):
        return None
    return Finding(
        "labels",
        "The batches are learnt in part, and all that is learnt makes the probe worse.",
        (Evidence("loss of batches / loss of chance", batches, "below", BELOW),
         Evidence("loss/probe / loss of chance", probe.last / chance, "above", ABOVE)),
        "The targets of the training examples are others than the probe's: shifted by a position, or in another order.",
        "Print inputs and targets of both side by side, and make them by the same code.",
        alternatives=("training examples unlike the probe", "labels that do not belong to their inputs"),
        step=history.step_of(FEW - 1),
    )  # fmt: skip


def _other_labels(history: History) -> Finding | None:
    agree, chance = history.value("probe/neighbors_agree"), history.value("probe/chance")
    loss = history.batch_loss.finite
    late = loss.values[len(loss) // 2 :]
    flat = float(np.median(late)) / chance
    moved, probe = _moved(history), history.probe_loss.last / chance
    near = (
        (_level(history) > LEVEL or flat > 1)
        and not _overlap(history) > NOISE
        and all(abs(ratio - 1) < PLATEAU for ratio in (flat, probe))
    )
    if agree < UNRELATED or not (near and moved > MOVING and moved * history.end > PATH):
        return None
    if min(np.median(part) for part in np.array_split(loss.values, PARTS)) < BELOW * chance:
        return None  # it had learnt, and has lost it again
    return Finding(
        "labels",
        "Nothing is learnt beyond the mean of the targets, though the weights move"
        + (" and neighbours share targets." if agree > UNRELATED else "."),
        (Evidence("loss of batches / loss of chance", flat, "below", 1 + PLATEAU),
         Evidence("loss/probe / loss of chance", probe, "below", 1 + PLATEAU),
         *([Evidence("probe/neighbors_agree", agree, "above", UNRELATED)] if agree > UNRELATED else [])),
        "The labels of the training examples do not belong to their inputs.",
        "Look at ten training examples with their labels; check that inputs and labels are shuffled together.",
        alternatives=("a plateau that some tasks have before they learn", "training examples unlike the probe"),
        step=max(history.step_of(FEW - 1), float(loss.steps[len(loss) // 2])),
    )  # fmt: skip
