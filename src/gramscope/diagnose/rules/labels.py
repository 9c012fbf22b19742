"""Labels that do not belong to their inputs: shuffled, or many of them wrong."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import end_of, removed_in_batches
from gramscope.diagnose.rule import LOSS, TARGETS, rule

UNRELATED = 0.1  # agreement of nearest neighbours above chance
RELATED = 0.3
HARDER = 1.3  # times the loss of the probe, in the mode of training
STUCK = 0.3  # of the batches' first loss is gone, at most
LEVEL = 0.985  # the last quarter of the batches against the quarter before: it does not fall
PLATEAU = 0.08  # relative distance from the loss of chance
MOVING = 1e-3  # of its norm a layer moves in one step
PATH = 1.0  # of its norm a layer has moved in all steps, if they went one way
LEFT = 0.5  # of the loss of chance
FEW = 8


@rule(
    "labels",
    needs=((("loss/probe",), TARGETS), (("batch loss",), LOSS), (("probe/chance",), TARGETS)),
    explains=("batch_too_small", "lr_too_small", "rank_collapse", "memorization", "class_missing"),
    order=3,
)
def find(history: History) -> Finding | None:
    """Three signs, each with what makes it one:

    1. The probe's labels have nothing to do with its inputs: the nearest neighbour of an example shares its label no
       more often than chance allows, and after training the probe's loss is no better than the best constant.
    2. The batches are much harder than held-out examples: their loss stays 30 % above the probe's (in the mode
       of training, so dropout does not count). Fresh examples cannot be easier, unless the labels of the
       training examples are wrong.
    3. The labels of the probe do belong to its inputs, and both losses stay at that of the best constant outputs,
       though the weights move: the network was shown other labels. Faults of the network or of the steps explain
       this better, where they are found.
    """
    if len(history.steps) < FEW or len(history.batch_loss.finite) < 10:
        return None
    return _unrelated(history) or _harder(history) or _other_labels(history)


def _unrelated(history: History) -> Finding | None:
    agree, chance = history.value("probe/neighbors_agree"), history.value("probe/chance")
    best = float(history.probe_loss.finite.values.min())
    fitted = history.value("probe/discrete") == 1 and removed_in_batches(history) > STUCK
    if fitted or not (agree < UNRELATED and best > 0.9 * chance):
        return None
    return Finding(
        "labels",
        "The labels have nothing to do with the inputs: neighbours do not share them, and the probe is not learnt.",
        (Evidence("probe/neighbors_agree", agree, "below", UNRELATED),
         Evidence("least loss/probe against chance", best / chance, "above", 0.9)),
        "Labels were shuffled against their inputs, or belong to another file or order.",
        "Look at ten examples with their labels; check that inputs and labels are shuffled together.",
        alternatives=("a task that no neighbour tells (modular arithmetic): then see memorization",),
        step=float(history.steps[FEW - 1]),
    )  # fmt: skip


def _harder(history: History) -> Finding | None:
    chance, batches = history.value("probe/chance"), end_of(history.batch_loss)
    easier = history.get("train_mode/loss") if history.has("train_mode/loss") else history.probe_loss
    probe = end_of(easier)
    if not (batches > HARDER * probe and batches > LEFT * chance):
        return None
    return Finding(
        "labels",
        f"The training batches stay harder than the probe: loss {batches:.2g} against {probe:.2g}.",
        (Evidence("loss of batches / loss of the probe", batches / max(probe, 1e-30), "above", HARDER),
         Evidence("loss of batches / loss of chance", batches / chance, "above", LEFT)),
        "Many labels of the training examples are wrong.",
        "Look at the training examples with the greatest loss, and correct or leave out wrong labels.",
        alternatives=("strong augmentation or regularisation inside the training loss",),
        step=float(history.steps[FEW - 1]),
    )  # fmt: skip


def _other_labels(history: History) -> Finding | None:
    agree, chance = history.value("probe/neighbors_agree"), history.value("probe/chance")
    loss = history.batch_loss.finite
    late = loss.values[len(loss) // 2 :]
    flat = float(np.median(late)) / chance
    ratios = [s.median() for s in history.family("update_ratio").values() if len(s.finite)]
    moved = float(np.median(ratios)) if ratios else 0.0
    probe = history.probe_loss.last / chance
    quarter = len(loss) // 4
    level = float(np.median(loss.values[-quarter:])) / max(
        float(np.median(loss.values[-2 * quarter : -quarter])), 1e-30
    )
    near = level > LEVEL and all(abs(ratio - 1) < PLATEAU for ratio in (flat, probe))
    if not (agree > RELATED and near and moved > MOVING and moved * history.end > PATH):
        return None
    return Finding(
        "labels",
        "Nothing is learnt beyond the mean of the targets, though the weights move and neighbours share targets.",
        (Evidence("loss of batches / loss of chance", flat, "below", 1 + PLATEAU),
         Evidence("loss/probe / loss of chance", probe, "below", 1 + PLATEAU),
         Evidence("probe/neighbors_agree", agree, "above", RELATED)),
        "The labels of the training examples do not belong to their inputs.",
        "Look at ten training examples with their labels; check that inputs and labels are shuffled together.",
        alternatives=("a plateau that some tasks have before they learn", "training examples unlike the probe"),
        step=float(history.steps[FEW - 1]),
    )  # fmt: skip
