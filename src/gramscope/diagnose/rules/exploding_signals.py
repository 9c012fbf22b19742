"""Signals that grow from layer to layer."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import MEASURES, rule
from gramscope.diagnose.rules.dead_units import MOST
from gramscope.diagnose.rules.depth import FEW_LAYERS, copies, early, slope

LARGE = 15.0  # times the least before it: root mean square of a layer's outputs
SIZE = 10.0  # and this size at least, where that of the inputs is about one
FACTOR = 1.3  # from one layer to the next
SURE = 2.5  # times the loss of equal outputs for all classes, before training


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
    factor above 1.3 over four layers or more, up to a size above 15 times the least before it, is far from the critical
    one. Units that are copies of one another also add up so; that is another finding (rank collapse). Or the outputs
    themselves are so large before training that the loss is 2.5 times ``log C``, that of C equal outputs: the network
    is sure of wrong answers. Normalisation layers hide large weights from all other signs.
    """
    sure = _sure(history)
    if sure > SURE and not copies(history):
        return _of_outputs(history, sure)
    layers, sizes = early(history, "signal")
    if len(sizes) < FEW_LAYERS or copies(history):
        return None
    factor, most = slope(sizes), int(sizes.argmax())
    growth = float(sizes[most] / np.maximum(sizes[: max(1, most)].min() if most else sizes[0], 1e-30))
    if not (factor > FACTOR and growth > LARGE and sizes[most] > SIZE):
        return None
    return Finding(
        "exploding_signals",
        f"Signals grow with depth, by {factor:.2g} times a layer, up to {sizes[most]:.3g} in layer {layers[most]}.",
        (Evidence("factor a layer", factor, "above", FACTOR), Evidence("growth", growth, "above", LARGE)),
        "The initial weights are too large for this depth, or a normalisation is missing.",
        "Initialise each layer for its fan-in and activation (He for ReLU), or add normalisation layers.",
        (layers[most],),
    )


def _sure(history: History) -> float:
    """The loss before training against that of equal outputs; NaN where units are dead then, which pass biases on."""
    loss, dead = history.probe_loss.finite, (s.first for s in history.family("dead_units").values())
    if not len(loss) or loss.steps[0] > 0 or max(dead, default=0.0) >= MOST or not history.value("probe/outputs") > 1:
        return float("nan")
    return loss.first / float(np.log(history.value("probe/outputs")))


def _of_outputs(history: History, sure: float) -> Finding:
    return Finding(
        "exploding_signals",
        f"The outputs are far too large before training: the loss is {sure:.2g} times that of equal outputs.",
        (Evidence("first loss/probe / log of the number of classes", sure, "above", SURE),),
        "The initial weights are too large, those of the last layer or of the embedding that it shares, or the outputs "
        "are multiplied by a factor.",
        "Initialise the last layer (and shared embeddings) with a deviation of 1/√width or less; check the others.",
        ("outputs",),
        float(history.probe_loss.steps[0]),
    )
