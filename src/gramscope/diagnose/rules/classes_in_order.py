"""Batches that come class by class."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule import LABELS, rule

ONE = 0.7  # of the probe is called by one name
SWITCHES = 2  # different names that lead so
OFTEN = 0.4  # of the measurements
EARLY = 8  # this part of the run does not count
FEW = 8


@rule(
    "classes_in_order",
    needs=((("class_predicted/*",), LABELS),),
    explains=("class_missing", "rank_collapse", "lr_too_large", "labels", "loss_spikes", "batch_too_small",
              "memorization", "head_only"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """The network calls nearly the whole probe by one class, and by another class later.

    A network that is shown one class at a time names that class for everything, and forgets it when the next comes. A
    collapsed network also names one class for all, but the same one; so several leaders are asked for, while the
    batches look easy: their loss lies well below that of the probe.
    """
    family = {c: s.finite for c, s in history.family("class_predicted").items()}
    if len(family) < 3 or any(len(s) < FEW for s in family.values()):
        return None
    names, steps = list(family), next(iter(family.values())).steps
    shares = np.stack([s.values for s in family.values()])  # (classes, records)
    late = steps > max(2.0, history.end / EARLY)  # a fresh network also calls all by one name
    shares, steps = shares[:, late], steps[late]
    leads = shares.max(0) >= ONE if len(steps) else np.zeros(0, dtype=bool)
    leaders = list(dict.fromkeys(names[place] for place in shares.argmax(0)[leads]))
    often = float(leads.mean()) if len(leads) else 0.0
    if len(leaders) < SWITCHES or often < OFTEN or not _easy(history, float(steps[0])):
        return None
    return Finding(
        "classes_in_order",
        f"The network calls nearly all examples by one class, which changes with time ({', '.join(leaders[:5])}).",
        (Evidence("share of measurements with one leading class", often, "above", OFTEN),
         Evidence("classes that led", float(len(leaders)), "above", SWITCHES - 1.0)),
        "Batches come sorted by class: the data are not shuffled.",
        "Shuffle the training examples: DataLoader(..., shuffle=True).",
        tuple(f"class {c}" for c in leaders),
        float(steps[np.flatnonzero(leads)[-1]]),
    )  # fmt: skip


def _easy(history: History, since: float) -> bool:
    """Whether the batches' loss lies below half of the probe's: of one class, they are easy."""
    batches, probe = history.batch_loss.since(since), history.probe_loss.since(since)
    return not len(batches.finite) or not len(probe.finite) or batches.median() < 0.5 * probe.median()
