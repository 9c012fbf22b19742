"""Features that vary along too few directions."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import later_half, removed
from gramscope.diagnose.rule import MEASURES, rule

NARROW = 1.6  # effective rank of the head's inputs
DIRECTIONS = 4.0  # classes, at least, of which fewer directions are too few
LEARNT = 0.75
FEW = 4


@rule("rank_collapse", needs=((("feature_rank/*",), MEASURES),), explains=("class_missing", "head_only"), order=3)
def find(history: History) -> Finding | None:
    """The head is given features of an effective rank near one, and the run does not learn well.

    C classes need C - 1 directions (neural collapse, arXiv:2008.08186, leaves exactly those). The effective rank of the
    centred features, ``tr(C)² / tr(C²)``, near 1 means that units are copies of one another: equal initial
    weights, a bottleneck, or depth without skip connections (arXiv:2103.03404).
    """
    family = {layer: s.finite for layer, s in history.family("feature_rank").items() if len(s.finite) >= FEW}
    if len(family) < 2:
        return None
    head = next(reversed(family))
    rank, inputs = later_half(family[head]).median(), next(iter(family.values())).median()
    classes = history.value("probe/classes")
    if np.isfinite(classes) and classes < DIRECTIONS:
        return None
    if not (rank < NARROW and inputs > 2 * NARROW and not removed(history) > LEARNT):
        return None
    return Finding(
        "rank_collapse",
        f"The features before layer {head} have an effective rank of {rank:.2g} only; the inputs have {inputs:.2g}.",
        (Evidence(f"feature_rank/{head}", rank, "below", NARROW),
         Evidence("feature_rank of the inputs", inputs, "above", 2 * NARROW)),
        "Units are copies of one another: equal initial weights, or a collapse with depth.",
        "Initialise weights at random, and independently for each unit; add skip connections where the network is deep.",
        (head,),
        float(family[head].steps[FEW - 1]),
    )  # fmt: skip
