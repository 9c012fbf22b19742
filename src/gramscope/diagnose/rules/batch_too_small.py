"""Batches so small that noise outweighs the gradient."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series, first_step, together
from gramscope.diagnose.progress import later_half
from gramscope.diagnose.rule_registry import OPTIMIZER, TARGETS, rule

NOISE = 5.0  # times the signal, in the squared norm of the batches' gradients
LATE = 2.5  # the same in the later half
SMALL = 8.0  # examples at most, as far as the batch can be told from its gradients,
SINGLE = 1.5  # or one: then the noise of the later half is enough
ALIKE = 0.9  # cosine of two gradients in a row: of noise it would be near 0
FEW = 14  # measurements,
YOUNG = 60  # and steps: the noise of a few measurements decides nothing


@rule(
    "batch_too_small",
    needs=((("gradient_given",), OPTIMIZER), (("gradient_norm",), TARGETS), (("loss/probe",), TARGETS)),
    explains=("loss_spikes", "rank_collapse", "class_missing", "labels", "dead_units"),
    order=2,
)
def find(history: History) -> Finding | None:
    """The gradients of the batches have five times as much noise as signal, for most of the run.

    ``E|g_B|² = |G|² + tr Σ / B`` (McCandlish et al., arXiv:1812.06162), so ``(|g_B| / |G|)² - 1`` is the noise scale
    divided by the batch. G is the gradient of the probe. At the end of training it grows in every run; so the median
    over all measurements, most of which come early, counts; two gradients in a row must then have a cosine below
    1/(1 + 5), or it is not noise (batch norm: G is taken in evaluation mode, with running means that lag), and the
    noise must last to the later half. The batch itself must be small: ``B = noise scale / ((|g_B| / |G|)² - 1)`` is
    below 8. Where it acts like one example, the noise of the later half is enough.
    """
    steps, (given, probe) = together(history.get("gradient_given"), history.get("gradient_norm"))
    if len(steps) < FEW or steps[-1] < YOUNG:
        return None
    noise = Series(steps, given**2 / np.maximum(probe**2, 1e-300) - 1)
    whole, late, batch = noise.median(), later_half(noise).median(), _batch(history, noise)
    overlap = history.get("gradient_overlap").finite
    alike = len(overlap) > 0 and overlap.median() > ALIKE and later_half(overlap).median() > ALIKE
    noisy = whole > NOISE and not overlap.median() > 1 / (1 + NOISE)
    if alike or not (late > LATE and batch < (SMALL if noisy else SINGLE)):
        return None
    evidence = (
        Evidence("noise / signal of a batch's gradient", max(whole, late), "above", NOISE if noisy else LATE),
        Evidence("batch, as its gradients show it", batch, "below", SMALL if noisy else SINGLE),
    )
    return Finding(
        "batch_too_small",
        "The batches are too small: their gradients are mostly noise.",
        evidence,
        "The batch has far fewer examples than the gradient noise scale.",
        "Take 8 to 32 times as many examples in a batch, or accumulate gradients.",
        step=first_step(noise, lambda values: values > LATE) or float(steps[0]),
    )


def _batch(history: History, noise: Series) -> float:
    steps, (known, ratio) = together(history.get("noise_scale"), noise)
    if len(steps) < FEW / 2:
        return float("inf")
    return float(np.median(np.where(ratio > 0, known / np.maximum(ratio, 1e-30), np.inf)))
