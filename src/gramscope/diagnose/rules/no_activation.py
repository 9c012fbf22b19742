"""Several layers of weights, and outputs that are affine in the inputs."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import NOT_NEEDED, rule

ROUNDING = 100.0  # times the spacing of the weights' numbers,
MOST = 1e-3  # at most: of 16 bits it cannot be told
SINGLE = 1.2e-7  # the spacing of float32


@rule(
    "no_activation",
    needs=((("outputs/not_affine",), f"{NOT_NEEDED}the inputs are no numbers, or there is one matrix of weights"),),
    explains=("lazy", "rank_collapse", "labels", "memorization"),
    order=0,
)
def find(history: History) -> Finding | None:
    """``f(a) + f(b) - f(c) = f(a + b - c)`` to rounding, at 16 triples of the probe's examples, before training.

    A network of several layers that does so computes what one layer could: activations are missing, or all units stay
    on one side of their kink. A fact; the threshold is a hundred roundings. Of 365 runs with activations none lay
    below 0.05, and none without above 1e-6. Only for inputs that are numbers. Deep linear networks may be meant so.
    """
    apart = history.value("outputs/not_affine")
    bound = min(MOST, ROUNDING * float(np.nan_to_num(history.value("precision"), nan=SINGLE)))
    if not apart < bound:
        return None
    return Finding(
        "no_activation",
        "The outputs are affine in the inputs: the layers together do what one layer could.",
        (Evidence("outputs/not_affine", apart, "below", bound),),
        "Activations between the layers are missing, or their units never switch.",
        "If this is not meant, put an activation (ReLU, GELU) after each hidden layer. It helps where one layer is too "
        "little for the task.",
        step=history.step_of(0),
    )
