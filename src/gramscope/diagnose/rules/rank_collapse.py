"""Features that vary along too few directions."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import later_half, removed
from gramscope.diagnose.rule import MEASURES, rule

NARROW = 1.3  # effective rank of the last hidden layer
COPIES = 1.1  # the same at the start: units are copies of one another
DIRECTIONS = 1.4  # of the targets
LEARNT = 0.75
FEW = 2


@rule(
    "rank_collapse",
    needs=((("feature_rank/*",), MEASURES),),
    explains=("class_missing", "head_only", "lr_too_large", "dead_units", "labels", "loss_spikes"),
    order=3,
)
def find(history: History) -> Finding | None:
    """The last hidden layer varies along one direction, the targets along more, and the run does not learn well.

    C classes need C - 1 directions (neural collapse, arXiv:2008.08186, leaves exactly those). The effective rank of the
    centred features, ``tr(C)² / tr(C²)``, near 1 means that units are copies of one another: equal initial
    weights, a bottleneck, or depth without skip connections (arXiv:2103.03404).
    """
    family = {layer: s.finite for layer, s in history.family("feature_rank").items() if len(s.finite) >= FEW}
    if len(family) < 2:
        return None
    layer, needed = list(family)[-2], history.value("probe/target_rank")
    rank, first = later_half(family[layer]).median(), float(np.median(family[layer].values[:FEW]))
    collapsed = rank < NARROW and not removed(history) > LEARNT
    if not (needed > DIRECTIONS and (collapsed or first < COPIES)):
        return None
    rank = min(rank, first)
    return Finding(
        "rank_collapse",
        f"The outputs of layer {layer} vary along {rank:.2g} directions only; the targets along {needed:.2g}.",
        (Evidence(f"feature_rank/{layer}", rank, "below", NARROW),
         Evidence("probe/target_rank", needed, "above", DIRECTIONS)),
        "Units are copies of one another: equal initial weights, or a collapse with depth.",
        "Initialise the weights of each unit at random; add skip connections where the network is deep.",
        (layer,),
        float(family[layer].steps[0 if first < COPIES else FEW - 1]),
    )  # fmt: skip
