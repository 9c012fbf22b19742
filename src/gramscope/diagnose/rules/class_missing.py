"""A class of the probe that the network never names."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.progress import end_of, later_part
from gramscope.diagnose.rule_registry import LABELS, rule

OTHERS = 0.6  # of the examples of the other classes are named right at the end,
BEFORE = 0.3  # and so many at least since this part of the steps:
SINCE = 3
FEW, LATE = 8, 2  # measurements, and those since then


@rule(
    "class_missing",
    needs=((("class_recall/*",), LABELS),),
    explains=("rank_collapse", "labels", "memorization"),
    order=1,
)
def find(history: History) -> Finding | None:
    """A class is named in none of its examples in the last two thirds of the steps, while the others are known.

    Classes are learnt one after another, so that one may come late; but not after three times the steps that the
    others took. One that was never shown is pushed down at every step: its examples cost more than ``log C`` each, so
    the probe, of which they are ``1/C``, costs ``log(C)/C`` more than the batches. While a class is merely late, both
    cost the same.
    """
    recalls = {c: s.finite.since(history.end / SINCE) for c, s in history.family("class_recall").items()}
    if len(recalls) < 3 or len(history.steps) < FEW or any(len(s) < LATE for s in recalls.values()):
        return None
    predicted = history.family("class_predicted")
    never = [c for c, s in recalls.items() if s.values.max() == 0 and _rarely(predicted.get(c), history.end / SINCE)]
    others = np.array([(s.values.min(), s.values[-1]) for c, s in recalls.items() if c not in never])
    before, known = np.median(others, axis=0).tolist() if len(others) else (0.0, 0.0)
    if not never or len(never) > len(recalls) / 3 or known < OTHERS or before < BEFORE:
        return None
    excess, bound = _excess_cost(history), len(never) * float(np.log(len(recalls))) / len(recalls)
    if excess < bound:
        return None
    return Finding(
        "class_missing",
        f"The network never names class {', '.join(never[:4])}, though it names most examples of the others.",
        (Evidence(f"class_recall/{never[0]}", 0.0, "equal to", 0.0),
         Evidence("class_recall of the others, median", known, "above", OTHERS),
         *([Evidence("loss/probe - loss of batches", excess, "above", bound)] if np.isfinite(excess) else [])),
        "The training examples hold no example of it, or its label is another there.",
        "Count the labels of the training examples, and compare the encoding of labels with that of the probe.",
        tuple(f"class {c}" for c in never),
        float(next(iter(recalls.values())).steps[0]),
    )  # fmt: skip


def _excess_cost(history: History) -> float:
    """How much more the probe costs than the batches; NaN where one of the losses is not known."""
    return end_of(history.probe_loss) - later_part(history.batch_loss.finite).median()


def _rarely(predicted: Series | None, since: float) -> bool:
    """Whether fewer than 1 % of the examples are called by this name."""
    return predicted is None or not predicted.since(since).values.max() >= 0.01
