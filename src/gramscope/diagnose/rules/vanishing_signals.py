"""Signals or gradients that die out from layer to layer."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import LEARNT, removed
from gramscope.diagnose.rule_registry import TARGETS, rule
from gramscope.diagnose.rules.depth import FEW_LAYERS, early, slope

FACTOR = 2.0  # from one layer to the next
WHOLE = 1e-3  # least gradient against the greatest


@rule(
    "vanishing_signals",
    needs=((("gradient_norm/*",), TARGETS),),
    explains=("head_only", "lr_too_small", "lazy", "rank_collapse", "half_precision", "dead_units", "labels"),
    order=1,
)
def find(history: History) -> Finding | None:
    """At the start, gradients grow from the first layer to the last by a factor of two a layer, over four layers.

    Backward signals pass ``√(fan_out σ_w² E[φ'²])`` from layer to layer (arXiv:1502.01852; arXiv:1611.01232): for
    sigmoids E[φ'²] is at most 1/16. The least gradient is less than a thousandth of the greatest. A layer whose units
    are dead passes exactly nothing, which is another finding. A run that learns all the same is left alone.
    """
    layers, sizes = early(history, "gradient_norm")
    if len(sizes) < FEW_LAYERS or not (sizes > 0).all():
        return None
    factor, least = slope(sizes), int(sizes.argmin())
    ratio = float(sizes[least] / sizes.max())
    if removed(history) > LEARNT or not (factor > FACTOR and ratio < WHOLE and least < len(sizes) / 2):
        return None
    return Finding(
        "vanishing_signals",
        f"Gradients vanish with depth: layer {layers[least]} has {ratio:.1e} of the greatest.",
        (
            Evidence("factor a layer", factor, "above", FACTOR),
            Evidence("least / greatest gradient", ratio, "below", WHOLE),
        ),
        "The initial weights are too small for this depth, or the activation is flat (sigmoid).",
        "Put a normalisation layer (batch or layer norm) before each activation, or add skip connections.",
        (layers[least],),
    )
