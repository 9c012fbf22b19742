"""Inputs far from zero mean and unit size."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import MEASURES, rule

LARGE, SMALL = 10.0, 0.03  # root mean square
OFF = 3.0  # mean against deviation


@rule(
    "inputs_not_normalized",
    needs=((("probe/rms", "probe/discrete"), MEASURES),),
    explains=("lr_too_large", "dead_units", "saturated_units", "exploding_signals", "rank_collapse", "loss_spikes",
              "lr_too_small", "batch_too_small", "clipping_always", "vanishing_signals", "labels", "head_only",
              "weight_decay_too_strong", "class_missing", "lazy", "oversmoothing"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Initialisations suppose inputs with a second moment near one (LeCun et al., Efficient BackProp, 1998).

    The curvature of the first layer grows with their square, and a mean that is large against the deviation makes one
    direction far steeper than the others: its condition number is at least ``1 + (mean/std)²``. A first layer that
    normalises by itself makes this harmless: then its outputs, not the inputs, are looked at.
    """
    rms, off = history.value("probe/rms"), history.value("probe/mean_over_std")
    evidence = []
    if rms > LARGE:
        evidence.append(Evidence("probe/rms", rms, "above", LARGE))
    elif rms < SMALL:
        evidence.append(Evidence("probe/rms", rms, "below", SMALL))
    if off > OFF:
        evidence.append(Evidence("probe/mean_over_std", off, "above", OFF))
    if not evidence or _normalised_first(history):
        return None
    return Finding(
        "inputs_not_normalized",
        f"The inputs have a root mean square of {rms:.3g} and a mean of {off:.2g} standard deviations.",
        tuple(evidence),
        "The inputs are not normalised (raw pixels, raw units).",
        "Subtract the mean of the training inputs and divide by their standard deviation.",
        ("inputs",),
    )


def _normalised_first(history: History) -> bool:
    """Whether the first layer's outputs have unit size whatever its inputs, as those of a normalisation layer have."""
    family = history.family("signal")
    first = next(iter(family), "")
    return bool(family) and first not in history.family("saturated_units") and 0.7 < family[first].first < 1.4
