"""Momentum that never lets go."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import OPTIMIZER, rule

MOST = 0.995


@rule(
    "momentum_too_large",
    needs=((("optimizer/momentum",), OPTIMIZER),),
    explains=("lr_too_large", "loss_spikes", "dead_units", "saturated_units", "rank_collapse", "exploding_signals",
              "labels", "classes_in_order", "class_missing", "memorization", "batch_too_small", "lr_too_small",
              "weight_decay_too_strong"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """The optimiser's momentum (of Adam: β₁) is 0.995 or more: a setting, hence a fact.

    A gradient acts for ``1/(1 - µ)`` steps, 200 at 0.995, and without end at 1, where the velocity is a plain sum of
    all gradients; the true step is ``lr/(1 - µ)``. Usual values are 0.9 to 0.99 (Goh, Why momentum really works, 2017).
    """
    momentum = history.get("optimizer/momentum").last
    if not momentum >= MOST:
        return None
    return Finding(
        "momentum_too_large",
        f"The optimiser's momentum is {momentum:g}: old gradients hardly fade.",
        (Evidence("optimizer/momentum", momentum, "above", MOST),),
        "The momentum is 1 or next to it; perhaps a value for an average of weights was given.",
        "Set momentum (or β₁) to 0.9.",
        step=float(history.get("optimizer/momentum").steps[0]),
    )
