"""Batches that come class by class."""

import numpy as np
from numpy.typing import NDArray

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Numbers
from gramscope.diagnose.rule_registry import CHANCE, LABELS, LOSS, rule

ONE = 0.7  # of the probe is called by one name,
OF_TWO = 0.9  # of two names,
EASY = 0.5  # while the loss of the batches around is below so much of the probe's, and below chance
AROUND = 2  # batches before and after the measurement
OFTEN = 2  # measurements
FEW = 8


@rule(
    "classes_in_order",
    needs=((("class_predicted/*",), LABELS), (("batch loss",), LOSS), (("probe/chance",), CHANCE)),
    explains=("class_missing", "rank_collapse", "lr_too_large", "labels", "loss_spikes", "batch_too_small",
              "memorization", "head_only", "dead_units", "oversmoothing"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """The network calls nearly the whole probe by one class, and the batches like it: their loss is small.

    A network that is shown one class at a time names that class for everything, and forgets it when the next comes. A
    collapsed or a fresh network also names one class for all; but then batches of all classes cost it as much as the
    probe does. So only batches of one class can cost half of that, and less than chance, where the probe costs more.
    The median of five batches in a row is taken, since one small batch may be of one class by accident.
    """
    family = {c: s.finite for c, s in history.family("class_predicted").items()}
    if len(family) < 2 or any(len(s) < FEW for s in family.values()):
        return None
    names, steps = list(family), next(iter(family.values())).steps
    shares = np.stack([s.values for s in family.values()])  # (classes, records)
    easy = (shares.max(0) >= (ONE if len(family) > 2 else OF_TWO)) & _easy(history, steps)
    if easy.sum() < OFTEN:
        return None
    leaders = list(dict.fromkeys(names[place] for place in shares.argmax(0)[easy]))
    changes = f", which changes with time ({', '.join(leaders[:5])})" if len(leaders) > 1 else f", class {leaders[0]}"
    return Finding(
        "classes_in_order",
        f"The network calls nearly all examples by one class{changes}, and the batches are of that class.",
        (Evidence("measurements with one class and easy batches", float(easy.sum()), "above", OFTEN - 1.0),
         Evidence("share of the probe in one class", float(shares.max(0)[easy].max()), "above", ONE)),
        "Batches come sorted by class: the data are not shuffled.",
        "Shuffle the training examples: DataLoader(..., shuffle=True).",
        tuple(f"class {c}" for c in leaders),
        float(steps[np.flatnonzero(easy)[OFTEN - 1]]),
        alternatives=() if len(leaders) > 1 else (f"nearly all training examples are of class {leaders[0]}",),
    )  # fmt: skip


def _easy(history: History, steps: Numbers) -> NDArray[np.bool_]:
    """At which steps batches cost less than chance and half of what the probe costs, and the probe more than chance."""
    batches, probe, chance = history.batch_loss.finite, history.probe_loss.finite, history.value("probe/chance")
    if len(batches) <= 2 * AROUND or not len(probe):
        return np.zeros(len(steps), dtype=bool)
    found = []
    for step in steps.tolist():
        place = int(np.clip(np.searchsorted(batches.steps, step), AROUND, len(batches) - 1 - AROUND))
        around = float(np.median(batches.values[place - AROUND : place + AROUND + 1]))
        own = float(np.interp(step, probe.steps, probe.values))
        found.append(0 <= around < min(EASY * own, chance) and own > chance)
    return np.array(found)
