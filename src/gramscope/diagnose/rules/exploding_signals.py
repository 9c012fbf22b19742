"""Signals that grow from layer to layer."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule import MEASURES, rule
from gramscope.diagnose.rules.depth import FEW_LAYERS, early, slope

LARGE = 30.0  # root mean square of a layer's outputs, where that of the inputs is about one
FACTOR = 1.5  # from one layer to the next


@rule(
    "exploding_signals",
    needs=((("signal/*",), MEASURES),),
    explains=("lr_too_large", "loss_spikes", "clipping_always", "half_precision", "batch_too_small", "head_only",
              "dead_units", "rank_collapse", "saturated_units", "lazy", "vanishing_signals", "labels", "class_missing"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """At the start, the root mean square of a layer's outputs grows by a factor from layer to layer.

    A ReLU layer multiplies it by ``√(fan_in σ_w² / 2)`` (He et al., arXiv:1502.01852), a residual branch adds to it. A
    factor above 1.5 over four layers or more, up to a size above 30 times that of the first layer, is far from the
    critical one.
    """
    layers, sizes = early(history, "signal")
    if len(sizes) < FEW_LAYERS:
        return None
    factor, most = slope(sizes), int(sizes.argmax())
    growth = float(sizes[most] / np.maximum(sizes[: max(1, most)].min() if most else sizes[0], 1e-30))
    if not (factor > FACTOR and growth > LARGE and sizes[most] > LARGE / 3):
        return None
    return Finding(
        "exploding_signals",
        f"Signals grow with depth, by {factor:.2g} times a layer, up to {sizes[most]:.3g} in layer {layers[most]}.",
        (Evidence("factor a layer", factor, "above", FACTOR), Evidence("growth", growth, "above", LARGE)),
        "The initial weights are too large for this depth, or a normalisation is missing.",
        "Initialise each layer for its fan-in and activation (He for ReLU), or add normalisation layers.",
        (layers[most],),
    )
