"""Parameters that want a gradient and are in no group of the optimiser."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import OPTIMIZER, rule
from gramscope.diagnose.rules.frozen_layer import named


@rule(
    "not_in_optimizer",
    needs=((("optimizer/lr",), OPTIMIZER),),
    explains=("head_only", "lazy", "frozen_layer"),
    order=0,
)
def find(history: History) -> Finding | None:
    """``requires_grad=True``, and yet in none of ``optimizer.param_groups``: a fact, without a threshold."""
    left = {layer: s.last for layer, s in history.family("not_optimized").items() if s.last > 0}
    if not left:
        return None
    layers = tuple(left)
    return Finding(
        "not_in_optimizer",
        f"The optimiser does not hold the parameters of {named(layers)}, although they want a gradient.",
        tuple(Evidence(f"not_optimized/{layer}", share, "above", 0.0) for layer, share in left.items())[:4],
        "The optimiser was given a list without them, or the layer was added or replaced after the optimiser was made.",
        "If they are to train, make the optimiser from model.parameters() after the model is complete.",
        layers,
        float(history.family("not_optimized")[layers[0]].steps[0]),
    )
