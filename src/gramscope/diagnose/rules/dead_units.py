"""ReLU units that are off for every example of the probe."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, first_step
from gramscope.diagnose.rule_registry import MEASURES, rule

MOST = 0.75  # of the units of a layer
LATER = 0.3  # of the units died since the start


@rule(
    "dead_units",
    needs=((("signal/*",), MEASURES),),
    explains=("rank_collapse", "vanishing_signals", "lr_too_small", "head_only", "class_missing", "lazy",
              "half_precision", "labels", "batch_too_small", "no_activation", "saturated_units"),
    order=2,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """A layer in which three quarters of the units are zero on the whole probe: no gradient passes, and they stay so.

    Units that are dead at the first measurement were initialised so; units that die later were pushed there by a step
    that was too long, which is then named first (Lu et al., arXiv:1903.06733).
    """
    family = {layer: s.finite for layer, s in history.family("dead_units").items() if len(s.finite)}
    dying = {layer: s for layer, s in family.items() if s.last >= MOST}
    if not dying:
        return None
    worst = max(dying, key=lambda layer: dying[layer].last)
    series = dying[worst]
    later = series.last - series.first > LATER
    began = first_step(series, lambda values: values >= MOST)
    cause = (
        "They died while training: a step was too long, or biases were pushed far below zero."
        if later
        else "They are off from the start: biases or inputs are far below zero."
    )
    remedy = (
        "Lower the learning rate by a factor of 3, or add a warm-up."
        if later
        else "Set the biases to zero and initialise for fan-in (He), or put a normalisation layer before the ReLU."
    )
    return Finding(
        "dead_units",
        f"{100 * series.last:.0f} % of the ReLU units of layer {worst} are dead"
        + (f", {100 * series.first:.0f} % at the start." if later else ", from the start on."),
        (Evidence(f"dead_units/{worst}", series.last, "above", MOST),),
        cause,
        remedy,
        tuple(dying),
        began or 0.0,
    )
