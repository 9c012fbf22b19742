"""Numbers of 16 bits that overflow, or swallow the steps."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import LEARNT, ended_finite, later_half, removed
from gramscope.diagnose.rule_registry import MEASURES, rule

COARSE = 5e-4  # relative spacing of numbers: 16 bits and fewer
ZEROS = 0.5  # of the gradients are exactly zero
SOLVED = 0.9  # of the first loss is gone


@rule(
    "half_precision",
    needs=((("precision",), MEASURES),),
    explains=("lr_too_large", "lr_too_small", "rank_collapse", "dead_units", "batch_too_small", "head_only", "lazy",
              "labels"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """The weights have 16 bits, and one of three things follows.

    Overflow: the loss or the weights are not finite (float16 ends at 65,504). Underflow: half of the gradients are
    exactly zero (float16 ends below at 6e-8). Lost steps: layers should move by less than the spacing of their
    numbers, ``eps |θ|``; a change below half of it is rounded away (arXiv:1710.03740, section 3.1), and most others are
    far from what they should be. Where this is so from the start on, a run is named unless it has learnt nearly all
    (90 %); where it comes later, as at the end of a schedule, unless it has learnt half.
    """
    eps = history.value("precision")
    if not eps > COARSE:
        return None
    made = _overflow(history) or _underflow(history) or _lost(history, eps)
    if made is None:
        return None
    what, evidence = made
    return Finding(
        "half_precision",
        what,
        (Evidence("precision of the weights", eps, "above", COARSE), *evidence),
        "The weights themselves are held in 16 bits.",
        "Keep the weights in float32 and use torch.autocast; then try a larger learning rate.",
        step=history.step_of(4),
    )


def _overflow(history: History) -> tuple[str, tuple[Evidence, ...]] | None:
    norm = history.get("norm/parameters")
    if ended_finite(history) and (not len(norm) or np.isfinite(norm.values[-1])):
        return None
    return "Numbers of 16 bits overflow: the loss or the weights are not finite.", ()


def _underflow(history: History) -> tuple[str, tuple[Evidence, ...]] | None:
    zeros = later_half(history.get("gradient_zeros").finite)
    dead = max((s.last for s in history.family("dead_units").values() if len(s.finite)), default=0.0)
    if not len(zeros) or not zeros.median() > max(ZEROS, dead):
        return None
    return "Gradients underflow: most of them are exactly zero.", (
        Evidence("gradient_zeros, median", zeros.median(), "above", ZEROS),
    )


def _lost(history: History, eps: float) -> tuple[str, tuple[Evidence, ...]] | None:
    layers = [s.finite for s in history.family("update_ratio").values() if len(s.finite)]
    if not layers:
        return None
    whole, late = (float(np.median([part(s).median() for s in layers])) for part in (lambda s: s, later_half))
    if not late < eps or removed(history) > (SOLVED if whole < eps else LEARNT):
        return None
    return "Steps are lost in rounding: they are shorter than the spacing of the numbers.", (
        Evidence("update_ratio, median", late, "below", eps),
    )
