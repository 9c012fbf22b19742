"""A learning rate that is too large: the run diverges, or jumps about and learns nothing."""

import math

import numpy as np

from gramscope.diagnose.alerts import find_alerts
from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import LEARNT, removed, removed_in_batches
from gramscope.diagnose.rule import TARGETS, rule

LONG = 0.3  # of its own norm a layer moves in one step, at the median of the layers
JUMP = 1.05  # times the first loss, or more, is reached after such steps
OFTEN = 0.5  # of the rehearsed steps raise the loss that they were to lower
MISSED = 1.0  # first-order error of a step: what the gradient predicts says nothing about it
FEW = 4


@rule(
    "lr_too_large",
    needs=((("loss/probe", "batch loss"), TARGETS),),
    explains=("dead_units", "saturated_units", "rank_collapse", "loss_spikes", "exploding_signals", "batch_too_small",
              "head_only", "oversmoothing", "clipping_always", "vanishing_signals", "labels", "class_missing",
              "classes_in_order", "memorization", "lr_too_small", "lazy", "weight_decay_too_strong"),
    order=2,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Steps that are too long for the loss: gradient descent is stable while ``lr · sharpness < 2``.

    1. The loss is not finite, or lies far above its start (the rule of :mod:`gramscope.diagnose.alerts`).
    2. Or layers moved by 30 % of their norm in one step, and the loss rose above its start. Healthy runs move by up
       to 9 %; the runs with too large a rate by 100 % and more, in their first steps, after which many are dead.
    3. Or the run has not learnt (half of the first loss is still there), and the optimiser's own step, rehearsed on
       the probe, raises the loss at half of the measurements or more while first order promises a fall; or first order
       misses the whole step (error above 1).

    At the edge of stability (arXiv:2103.00065) healthy runs also hover near 2, but they learn; so part 3 asks first.
    """
    ended = _diverged(history) or _leapt(history)
    if ended is not None:
        return ended
    gone = np.nanmax([removed(history), removed_in_batches(history), -1.0])
    evidence = [] if gone > LEARNT else _steps_that_raise(history)
    if not evidence:
        return None
    return _finding("The steps are too long: the run jumps about and does not learn.", evidence, history)


def _leapt(history: History) -> Finding | None:
    family = [s.finite for s in history.family("update_ratio").values() if len(s.finite)]
    steps = np.unique(np.concatenate([s.steps for s in family])) if family else np.empty(0)
    for step in steps.tolist():
        typical = float(np.median([s.values[s.steps == step][0] for s in family if step in s.steps]))
        if typical > LONG:
            jump = _highest(history, step) / max(abs(history.probe_loss.first), 1e-30)
            if not jump > JUMP:
                return None
            evidence = [Evidence(f"update_ratio at step {step:.0f}", typical, "above", LONG),
                        Evidence("greatest loss / first loss", jump, "above", JUMP)]  # fmt: skip
            return _finding(
                f"The steps are too long: at step {step:.0f} the weights moved by {100 * typical:.0f} % of their norm.",
                evidence, history, step,
            )  # fmt: skip
    return None


def _highest(history: History, since: float) -> float:
    values = history.probe_loss.since(since).finite.values
    return float(values.max()) if len(values) else math.nan


def _finding(what: str, evidence: list[Evidence], history: History, step: float | None = None) -> Finding:
    steps = history.get("optimizer/lr")
    return Finding(
        "lr_too_large",
        what,
        tuple(evidence),
        "The learning rate is too large for this loss, or it is raised too fast.",
        "Lower the learning rate by a factor of 10; then add a warm-up if a larger one is wanted later.",
        step=float(history.steps[min(FEW, len(history.steps) - 1)]) if step is None else step,
        where=() if not len(steps) else (f"lr {steps.last:g}",),
    )


def _diverged(history: History) -> Finding | None:
    series = {"loss": history.batch_loss, "loss/probe": history.probe_loss}
    found = find_alerts({name: (s.steps.astype(int).tolist(), s.values.tolist()) for name, s in series.items()})
    for alert in found:
        if alert.what == "not finite":
            return _finding("The loss is not finite.", [Evidence(alert.where, alert.value, "equal to", math.nan)],
                            history, float(alert.step))  # fmt: skip
        if alert.what == "divergence" and not _fits_batches(history):
            above = Evidence(alert.where, alert.value, "above", alert.threshold)
            return _finding("The loss has grown far above its start.", [above], history, float(alert.step))
    return None


def _fits_batches(history: History) -> bool:
    """Whether the training batches are learnt all the same: then the probe's loss rises by overfitting."""
    return removed_in_batches(history) > LEARNT


def _steps_that_raise(history: History) -> list[Evidence]:
    promised, true = history.get("step/predicted_loss_change").finite, history.get("step/true_loss_change").finite
    missed = history.get("step/error").finite
    found = []
    if len(true) >= FEW and len(promised) == len(true):
        loss = history.probe_loss.finite
        size = max(abs(loss.first), 1e-30)
        raised = (true.values > 0.01 * size) & (promised.values < 0)
        if (share := float(raised.mean())) >= OFTEN:
            found.append(Evidence("share of rehearsed steps that raise the loss", share, "above", OFTEN))
    if len(missed) >= FEW and missed.median() > MISSED:
        found.append(Evidence("step/error, median", missed.median(), "above", MISSED))
    return found
