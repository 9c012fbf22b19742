"""Features that vary along too few directions."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.progress import falls, later_half, removed
from gramscope.diagnose.rule_registry import MEASURES, rule
from gramscope.diagnose.rules.depth import COPIES as EXACT

NARROW = 0.0375  # of the directions of the targets beyond the first: at ten classes an effective rank of 1.3
COPIES = 1.1  # the same at the start, and still: units are copies of one another
DIRECTIONS = 1.4  # of the targets
TRIED = 48  # directions of targets that known cases had: a language model learns few of its hundreds for a long time
LEARNT = 0.75
FEW = 2  # measurements, of copies
BRANCH = 2.0  # times its directions the outputs have at the start, where it is not all that they are made of
YOUNG = 14  # measurements, of a collapse: a fresh network may start narrow and widen


@rule(
    "rank_collapse",
    needs=((("feature_rank/*",), MEASURES),),
    explains=("head_only", "lr_too_large", "dead_units", "labels", "loss_spikes"),
    order=3,
)
def find(history: History) -> Finding | None:
    """The last hidden layer varies along one direction, the targets along more, and the run does not learn well.

    C classes need C - 1 directions (neural collapse, arXiv:2008.08186, leaves exactly those). The effective rank of the
    centred features, ``tr(C)² / tr(C²)``, near 1 means that units are copies of one another: equal initial
    weights, a bottleneck, or depth without skip connections (arXiv:2103.03404). Directions are learnt one after
    another, so how near to 1 goes by how many the targets have. Where all hidden layers vary along exactly one
    direction before training, their units are copies whatever the targets (inputs of one number do that to the first
    alone). A layer of one direction before outputs that vary along two or more at the start is a branch that takes one
    number, such as the time step of a diffusion model. Features that were narrow and have widened again at the end are
    left alone, and so is a run whose loss still falls. Of the hundreds of directions that the targets of a language
    model have, ``TRIED`` count.
    """
    family = {layer: s.finite for layer, s in history.family("feature_rank").items() if len(s.finite) >= FEW}
    if len(family) < 2:
        return None
    layer, needed = list(family)[-2], history.value("probe/target_rank")
    rank, first = later_half(family[layer]).median(), float(np.median(family[layer].values[:FEW]))
    narrow = 1 + NARROW * (min(needed, TRIED) - 1)
    lasts = max(rank, family[layer].last) < narrow
    collapsed = len(family[layer]) >= YOUNG and lasts and not removed(history) > LEARNT and not falls(history)
    outputs = list(family.values())[-1]
    branch = first < COPIES and outputs.first > BRANCH * first  # other layers feed the outputs, too
    copied = first < EXACT or max(first, family[layer].last) < COPIES
    hidden = [s.first for s in family.values()][:-1]
    everywhere = len(hidden) > 1 and max(hidden) < EXACT
    if not (everywhere or (needed > DIRECTIONS and (collapsed or copied) and not branch)):
        return None
    rank = min(rank, first)
    evidence = [Evidence(f"feature_rank/{layer}", rank, "below", max(narrow, COPIES) if copied else narrow)]
    evidence += [Evidence("probe/target_rank", needed, "above", DIRECTIONS)] if needed > DIRECTIONS else []
    return Finding(
        "rank_collapse",
        f"The outputs of layer {layer} vary along {_directions(rank)} only"
        + (f"; the targets along {needed:.3g}." if needed > DIRECTIONS else ", and so do those of all hidden layers."),
        tuple(evidence),
        "Units are copies of one another: equal initial weights, or a collapse with depth.",
        "Initialise the weights of each unit at random; add skip connections where the network is deep.",
        (layer,),
        float(family[layer].steps[0]) if copied else _since(family[layer], narrow),
    )  # fmt: skip


def _directions(rank: float) -> str:
    return "one direction" if f"{rank:.2g}" == "1" else f"{rank:.2g} directions"


def _since(rank: Series, bound: float) -> float:
    """The first step at which the features are narrow and from which on four of five measurements are."""
    narrow = rank.values < bound
    share = np.cumsum(narrow[::-1])[::-1] / np.arange(len(narrow), 0, -1)
    return float(rank.steps[np.flatnonzero(narrow & (share >= 0.8))[0]]) if narrow[-1] else float(rank.steps[-1])
