"""A loss that is not finite from one step to the next, while the run was at ease."""

import math

import numpy as np

from gramscope.diagnose.divergence import Divergence, find_divergence
from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import LOSS, OPTIMIZER, rule
from gramscope.diagnose.rules.half_precision import COARSE
from gramscope.diagnose.rules.lr_too_large import LONG

GROWN = 1.5  # times what they were: the losses before
LAST = 5  # losses


@rule(
    "not_a_number",
    needs=((("batch loss",), LOSS), (("update_ratio/*",), OPTIMIZER)),
    explains=("lr_too_large", "half_precision", "dead_units", "saturated_units", "rank_collapse", "loss_spikes"),
    order=1,
)
def find(history: History) -> Finding | None:
    """The loss ends not finite, and neither the losses nor the steps had grown before, or there was no step before.

    Steps that are too long lead away first: losses and updates grow. Here the last finite losses lie below 1.5 times
    the first, and no layer moved by more than 30 % of its norm in a step. So one number was not a number in itself: in
    the data, or in an operation (log or square root of zero, 0/0).
    """
    losses, norm = history.batch_loss, history.get("norm/parameters")
    series = {"loss": losses, "loss/probe": history.probe_loss, "norm/parameters": norm}
    end = find_divergence({n: s for n, s in series.items() if len(s)}, history.steps.astype(int).tolist())
    if end is None or end.blown or not len(losses) or history.value("precision") > COARSE:
        return None
    before = losses.until(float(end.step)).finite.values
    if not len(before) and len(history.probe_loss.finite):  # the first batch, and the first weights are sound
        return _finding(end, [])
    moved = max((float(s.finite.values.max()) for s in history.family("update_ratio").values() if len(s.finite)),
                default=0.0)  # fmt: skip
    growth = float(before[-LAST:].max() / before[:LAST].max()) if len(before) else np.inf
    if growth > GROWN or moved > LONG:
        return None
    return _finding(end, [Evidence("last finite losses / first", growth, "below", GROWN)])


def _finding(end: Divergence, evidence: list[Evidence]) -> Finding:
    return Finding(
        "not_a_number",
        f"The {end.what} {'is' if end.what == 'loss' else 'are'} not finite"
        + (", and nothing had grown before." if evidence else " from the first batch on."),
        (Evidence(f"{end.what} from step {end.step} on", math.nan, "equal to", math.nan), *evidence),
        "A batch holds NaN or infinities, or an operation makes them: log or square root of zero, a division by zero.",
        f"Look at the batch of step {end.step} with torch.isfinite; then run it under torch.autograd.detect_anomaly().",
        (f"step {end.step}",),
        float(end.step),
    )  # fmt: skip
