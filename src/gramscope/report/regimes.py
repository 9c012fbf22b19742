"""Lazy or rich: the verdict on a run, and what it rests on."""

from gramscope.diagnose.divergence import Divergence
from gramscope.diagnose.thresholds import (
    BLOWN,
    ENOUGH_READINGS,
    ENOUGH_STEPS,
    LAZY_FEATURES,
    LAZY_KERNEL,
    RICH_FEATURES,
    RICH_KERNEL,
)
from gramscope.report.panels.drawing import number
from gramscope.report.panels.kernels import largest, moved
from gramscope.report.panels.richness import feature_change
from gramscope.report.panels.validity import (
    at_step,
    begun_again,
    divergence,
    enough,
    how_it_diverged,
    other_loss,
    retrained,
    tells_change,
    times_measured,
)
from gramscope.report.view import RunView, Series

STILL = 0.05  # a loss that fell by a smaller part of itself has not been learnt

RULE = (
    "a run is lazy where its feature change (one minus the CKA of the last hidden features with those at the start) "
    f"is below {LAZY_FEATURES} or its largest kernel drift |K − K₀| / |K₀| below {LAZY_KERNEL}. It is rich where "
    f"the largest drift is above {RICH_KERNEL}. Without a kernel the feature change decides alone (above "
    f"{RICH_FEATURES} rich). A kernel that stands still while the features change as much lies in between. "
    "These thresholds were fitted on runs of known regime (docs/calibration.md). A verdict "
    f"takes {ENOUGH_READINGS} measurements from the start on, over {ENOUGH_STEPS} steps. A run has diverged "
    f"if its loss ends not finite or above {BLOWN:.0f} times its start, or if its loss on the probe was above that "
    "once and ends no lower than it started"
)


def kernel_drift(view: RunView) -> Series | None:
    """How far the kernel moved, where that can be said: measured twice, and from one start, of the same parameters.

    A drift that was measured in the first half of the run alone says nothing where the features tell of all of it.
    """
    drift, features = moved(view), feature_change(view)
    if drift is None or times_measured(drift) < 2 or undone(view) is not None:
        return None
    early = 2 * float(drift.finite.steps[-1]) < view.end
    return None if early and features is not None and enough(view, features) else drift


def undone(view: RunView) -> str | None:
    """Why the drift that was recorded is not one from the start of the run; None where it is."""
    drift, switch = moved(view), retrained(view)
    if switch is not None:
        return f"{switch}, so the kernel's drift compares different parameters"
    again = begun_again(drift) if drift is not None else None
    return None if again is None else f"the kernel's drift was measured again from step {again:,}, as after a restart"


def regime(view: RunView) -> str:
    """By the page's rule "lazy", "rich", "in between" or "diverged"; else "too short" to tell, or "unknown"."""
    if divergence(view) is not None:
        return "diverged"
    features, drift = feature_change(view), kernel_drift(view)
    still = features is not None and enough(view, features) and features.last < LAZY_FEATURES
    if drift is not None and enough(view, drift):
        # The kernel also moves where a readout alone trains: features that stand still make a run lazy all the same.
        kind = "lazy" if still else _by_kernel(drift)
        return "in between" if kind == "lazy" and _features_moved(view, features) else kind
    if features is not None and enough(view, features):
        return judged(features.last, LAZY_FEATURES, RICH_FEATURES)
    return "too short" if any(s is not None and times_measured(s) for s in (moved(view), features)) else "unknown"


def _features_moved(view: RunView, features: Series | None) -> bool:
    return features is not None and enough(view, features) and features.last > RICH_FEATURES


def _by_kernel(drift: Series) -> str:
    return judged(largest(drift)[1], LAZY_KERNEL, RICH_KERNEL)


def judged(value: float, lazy: float, rich: float) -> str:
    """
    >>> judged(0.1, lazy=0.2, rich=0.5), judged(0.3, 0.2, 0.5), judged(0.6, 0.2, 0.5)
    ('lazy', 'in between', 'rich')
    """
    return "lazy" if value < lazy else "rich" if value > rich else "in between"


def verdict(view: RunView, end: Divergence | None) -> str:
    """The regime in one sentence, with the numbers it rests on."""
    if end is not None:
        return f"The run diverged at step {end.step:,}: {how_it_diverged(view, end)}."
    kind = regime(view)
    if kind == "too short":
        return _too_short(view)
    if kind == "unknown":
        return _unknown(view)
    features, drift = feature_change(view), kernel_drift(view)
    grounds = [] if features is None else [f"feature change {number(features.last)} at {at_step(features)}"]
    if drift is not None:
        step, value = largest(drift)
        grounds.append(f"largest kernel drift {number(value)} at step {step:,.0f}")
    lazy = "neither its features nor its loss moved much" if unlearnt(view) else "its features hardly moved"
    if drift is not None and _by_kernel(drift) == "rich":
        lazy += ", though its kernel did: larger outputs or the last layer alone can do that"
    between = ": its kernel hardly moved, but its last features did"
    apart = drift is not None and _by_kernel(drift) == "lazy" and _features_moved(view, features)
    told = {
        "lazy": f"The run is lazy: {lazy}",
        "rich": f"The run is rich: it changed its features{', but its loss did not fall' * unlearnt(view)}",
        "in between": f"The run lies between lazy and rich{between * apart}",
    }[kind]
    return f"{told} ({', '.join(grounds)})."


def _unknown(view: RunView) -> str:
    richness = view.series.get("richness")
    if richness is not None and times_measured(richness):
        return (
            "Lazy or rich cannot be told: neither the change of the features nor a kernel was recorded, and D_LR alone "
            "does not tell (docs/calibration.md)."
        )
    return "Lazy or rich cannot be told: neither the change of the features nor a kernel was recorded."


def _too_short(view: RunView) -> str:
    why = undone(view)
    if why is not None and enough(view, moved(view)):
        return f"Lazy or rich cannot be told: {why}."
    found = [series for series in (moved(view), feature_change(view)) if series is not None]
    most = max(times_measured(series) for series in found)
    return (
        f"There is not enough to tell lazy from rich: it takes {ENOUGH_READINGS} measurements of the features or of "
        f"the kernel from the start on, over {ENOUGH_STEPS} steps, and there {'is' if most == 1 else 'are'} {most} up "
        f"to step {view.end:,}."
    )


def unlearnt(view: RunView) -> bool:
    """Whether the probe's loss stands still too: then still features say nothing about how the network learns."""
    loss = view.series.get("loss/probe")
    still = loss is not None and tells_change(view, loss) and loss.first - loss.last < STILL * abs(loss.first)
    return still and not other_loss(view)
