"""The last layer does all the learning."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
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
    head = history.head or ""
    own, others = _against(history, "update_ratio", head)
    if not own > APART * others:
        return None
    rate, other_rates = _against(history, "effective_lr", head)
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
        f"Layer {head} does all the learning: a step moves it by {own:.2g} of its norm, the others by {others:.2g}.",
        tuple(evidence),
        "The learning rate of the other layers is far smaller."
        if by_rate
        else "Gradients do not reach the other layers.",
        "Give all layers the same learning rate."
        if by_rate
        else "Look for vanishing gradients, dead units or detach().",
        (head,),
        float(history.get(f"update_ratio/{head}").finite.steps[FEW - 1]),
    )


def _against(history: History, prefix: str, head: str) -> tuple[float, float]:
    """The median at the head, and that of the medians of the other layers; NaN where there are too few."""
    medians = {layer: s.median() for layer, s in history.family(prefix).items() if len(s.finite) >= FEW}
    others = [value for layer, value in medians.items() if layer != head]
    return medians.get(head, np.nan), float(np.median(others)) if others else np.nan
