"""The last layer does all the learning."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.progress import LEARNT, removed
from gramscope.diagnose.rule_registry import OPTIMIZER, rule

CAPPED = 1e9  # of a ratio to layers that do not move at all
APART = 100.0  # times the relative step of the other layers, and the effective learning rate
FEW = 4


@rule("head_only", needs=((("update_ratio/*",), OPTIMIZER),), explains=("lr_too_small", "lazy"), order=0)
def find(history: History) -> Finding | None:
    """The head moves a hundred times as far as all other layers, measured against their own norms and gradients.

    ``update_ratio`` is |Δθ|/|θ| of the optimiser's true step, ``effective_lr`` |Δθ|/|g|. Where both are a hundred times
    as large at the head as at the median of the other layers, the rest stands still by its learning rate, not by
    its gradient; where only the first is, gradients do not reach the rest, unless the run learns all the same.
    """
    ratios = {layer: s.finite for layer, s in history.family("update_ratio").items() if len(s.finite) >= FEW}
    head = history.head
    if head not in ratios or len(ratios) < 2:
        return None
    own, others = _against(ratios, head)
    if not own > APART * others:
        return None
    rates = {layer: s.finite for layer, s in history.family("effective_lr").items() if len(s.finite) >= FEW}
    rate, other_rates = _against(rates, head) if head in rates and len(rates) > 1 else (np.nan, np.nan)
    by_rate = bool(rate > APART * other_rates)
    if not by_rate and removed(history) > LEARNT:
        return None
    evidence = [
        Evidence("update_ratio of the head / median of the others", own / max(others, own / CAPPED), "above", APART)
    ]
    if by_rate:
        evidence.append(Evidence("effective_lr, the same", rate / max(other_rates, rate / CAPPED), "above", APART))
    return Finding(
        "head_only",
        f"Layer {head} does all the learning: it moves {own:.1e} of its norm in a step, the others {others:.1e}.",
        tuple(evidence),
        "The learning rate of the other layers is far smaller."
        if by_rate
        else "Gradients do not reach the other layers.",
        "Give all layers the same learning rate."
        if by_rate
        else "Look for vanishing gradients, dead units or detach().",
        (head,),
        float(ratios[head].steps[FEW - 1]),
    )


def _against(family: dict[str, Series], head: str) -> tuple[float, float]:
    medians = {layer: series.median() for layer, series in family.items()}
    return medians[head], float(np.median([value for layer, value in medians.items() if layer != head]))
