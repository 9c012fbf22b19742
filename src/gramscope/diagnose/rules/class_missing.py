"""A class of the probe that the network never names."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import later_half
from gramscope.diagnose.rule import LABELS, rule

OTHERS = 0.6  # of the other classes are named right
FEW = 8


@rule("class_missing", needs=((("class_recall/*",), LABELS),), explains=("rank_collapse", "labels"), order=1)
def find(history: History) -> Finding | None:
    """A class is named in none of its examples in the second half of the run, while the median class is learnt.

    A class that is rare or hard is named now and then; one that was never shown is pushed down at every step.
    """
    recalls = {c: s.finite for c, s in history.family("class_recall").items() if len(s.finite) >= FEW}
    if len(recalls) < 3:
        return None
    late = {c: later_half(s).values for c, s in recalls.items()}
    never = [c for c, values in late.items() if values[-3:].max() == 0]
    others = float(np.median([values[-1] for c, values in late.items() if c not in never] or [0.0]))
    predicted = history.family("class_predicted")
    never = [c for c in never if c not in predicted or later_half(predicted[c]).values[-3:].max() < 0.01]
    if not never or len(never) > len(recalls) / 3 or others < OTHERS:
        return None
    return Finding(
        "class_missing",
        f"The network never names class {', '.join(never[:4])}, though it names the others right.",
        (Evidence(f"class_recall/{never[0]}", 0.0, "equal to", 0.0),
         Evidence("class_recall of the others, median", others, "above", OTHERS)),
        "The training examples hold no example of it, or its label is another there.",
        "Count the labels of the training examples, and compare the encoding of labels with that of the probe.",
        tuple(f"class {c}" for c in never),
        float(next(iter(recalls.values())).steps[FEW - 1]),
    )  # fmt: skip
