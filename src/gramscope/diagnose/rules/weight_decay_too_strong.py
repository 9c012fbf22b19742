"""Weight decay that pulls the weights down faster than the loss builds them up."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, together
from gramscope.diagnose.progress import LEARNT, removed
from gramscope.diagnose.rule_registry import OPTIMIZER, TARGETS, rule

SHRUNK = 0.7  # of the first norm of all parameters
PULL = 0.5  # of the step (or of the gradient) that is weight decay
FEW = 5


@rule(
    "weight_decay_too_strong",
    needs=((("optimizer/weight_decay",), OPTIMIZER), (("norm/parameters",), TARGETS)),
    explains=("rank_collapse", "lr_too_small", "vanishing_signals", "head_only", "dead_units", "oversmoothing",
              "batch_too_small", "lr_too_large", "class_missing", "labels"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Decay makes up half of what moves the weights, the weights shrink, and the loss stays.

    Decoupled (AdamW, arXiv:1711.05101) the decay moves them by ``lr λ |θ|`` of the true step |Δθ|; through the gradient
    by ``λ |θ|`` against the gradient |g|. At rest both are equal. A run that learns all the same is left alone.
    """
    decay, norm = history.get("optimizer/weight_decay").last, history.get("norm/parameters").finite
    if not decay > 0 or len(norm) < FEW:
        return None
    shrunk, gone = norm.last / norm.first, removed(history)
    pull = _pull(history, decay)
    if not (pull > PULL and shrunk < SHRUNK and not gone > LEARNT):
        return None
    return Finding(
        "weight_decay_too_strong",
        f"Weight decay {decay:g} shrinks the weights to {shrunk:.2f} of their first norm, and little is learnt.",
        (Evidence("weight decay's part of the step", pull, "above", PULL),
         Evidence("norm/parameters, last / first", shrunk, "below", SHRUNK),
         Evidence("part of the first loss that is gone", gone, "below", LEARNT)),
        "The weight decay is too strong for this learning rate and loss.",
        "Divide weight_decay by 100, or set it to 0.",
        step=float(norm.steps[FEW - 1]),
    )  # fmt: skip


def _pull(history: History, decay: float) -> float:
    decoupled = history.value("optimizer/decoupled") == 1
    names = ("update_size" if decoupled else "gradient_given", "norm/parameters", "optimizer/lr")
    steps, (against, norm, rate) = together(*map(history.get, names))
    pulls = decay * norm * (rate if decoupled else 1.0) / np.maximum(against, 1e-30)
    return float(np.median(pulls)) if len(steps) >= FEW else float("nan")
