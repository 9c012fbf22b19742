"""Tokens that become alike from layer to layer."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import LEARNT, removed
from gramscope.diagnose.rule_registry import NOT_NEEDED, rule

ALIKE = 0.03  # of the variance lies between the tokens of an example
APART = 0.3  # of the variance, or more, lies there in the last layer of a network whose tokens stay apart
FALL = 10.0  # times less than in the first layer
FEW = 4


@rule(
    "oversmoothing",
    needs=((("token_variance/*",), f"{NOT_NEEDED}no tokens were seen"),),
    explains=("rank_collapse", "lr_too_small", "vanishing_signals", "head_only", "labels"),
    order=2,
)
def find(history: History) -> Finding | None:
    """The tokens of one example are the same vector up to 3 % of the variance, and were not so in the first layer.

    Attention is an average over tokens: without skip connections and units between, it takes the tokens together at an
    exponential rate with depth (Dong et al., arXiv:2103.03404). Where the tokens of the last layer differ again (30 %),
    a skip connection went past the average, and nothing is wrong. Nor is it where half of the first loss is gone:
    tokens that all hold the answer are alike, too.
    """
    family = {layer: s.finite for layer, s in history.family("token_variance").items() if len(s.finite) >= FEW}
    if len(family) < 3:
        return None
    layers = list(family)
    shares = np.array([s.median() for s in family.values()])
    least = int(shares.argmin())
    if not (shares[least] < ALIKE and shares[:2].max() > FALL * shares[least] and least >= 2):
        return None
    if shares[-1] > APART or removed(history) > LEARNT:
        return None
    return Finding(
        "oversmoothing",
        f"Tokens become alike: in layer {layers[least]} {100 * shares[least]:.1g} % of the variance lies between them.",
        (Evidence(f"token_variance/{layers[least]}", float(shares[least]), "below", ALIKE),
         Evidence("token_variance at first", float(shares[:2].max()), "above", FALL * float(shares[least]))),
        "Attention averages tokens, and nothing keeps them apart: skip connections are missing or weak.",
        "Add skip connections around attention, or fewer layers of it.",
        (layers[least],),
        float(family[layers[least]].steps[FEW - 1]),
    )  # fmt: skip
