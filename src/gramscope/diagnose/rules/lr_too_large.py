"""A learning rate that is too large: the run diverges, or jumps about and learns nothing."""

import math
from collections.abc import Mapping

import numpy as np

from gramscope.diagnose.divergence import Divergence, find_divergence
from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.progress import LEARNT, removed, removed_in_batches
from gramscope.diagnose.rule_registry import TARGETS, rule
from gramscope.diagnose.thresholds import BLOWN

LONG = 0.3  # of its own norm a layer moves in one step, at the median of the layers
JUMP = 1.05  # times the first loss, or more, is reached after such steps
OFTEN = 0.5  # of the rehearsed steps raise the loss that they were to lower
MISSED = 1.0  # first-order error of a step: what the gradient predicts says nothing about it
FEW = 4


@rule(
    "lr_too_large",
    needs=((("loss/probe", "batch loss", "loss", "norm/parameters", "refused numbers"), TARGETS),),
    explains=("dead_units", "saturated_units", "rank_collapse", "loss_spikes", "exploding_signals", "batch_too_small",
              "head_only", "oversmoothing", "clipping_always", "vanishing_signals", "labels", "class_missing",
              "classes_in_order", "memorization", "lr_too_small", "lazy", "weight_decay_too_strong"),
    order=2,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Steps that are too long for the loss: gradient descent is stable while ``lr · sharpness < 2``.

    1. The loss or the weights end not finite or blown up (:mod:`gramscope.diagnose.divergence`, which the report goes
       by too).
    2. Or layers moved by 30 % of their norm in one step, and the loss rose above its start. Healthy runs move by up
       to 9 %; the runs with too large a rate by 100 % and more, in their first steps, after which many are dead.
    3. Or the run has not learnt (half of the first loss is still there), and the optimiser's own step, rehearsed on
       the probe, raises the loss at half of the measurements or more while first order promises a fall; or first order
       misses the whole step (error above 1).

    At the edge of stability (arXiv:2103.00065) healthy runs also hover near 2, but they learn; so part 3 asks first.
    """
    ended = [found for found in (_diverged(history), _leapt(history)) if found is not None]
    if ended:
        return min(ended, key=lambda found: found.step)  # what came first may explain the rest
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
            jump = _highest(history, step) / max(abs(history.loss.first), 1e-30)
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
    values = history.loss.since(since).finite.values
    return float(values.max()) if len(values) else math.nan


def _finding(what: str, evidence: list[Evidence], history: History, step: float | None = None) -> Finding:
    steps = history.get("optimizer/lr")
    return Finding(
        "lr_too_large",
        what,
        tuple(evidence),
        "The learning rate is too large for this loss, or it is raised too fast.",
        "Lower the learning rate by a factor of 10; then add a warm-up if a larger one is wanted later.",
        step=history.step_of(FEW) if step is None else step,
        where=() if not len(steps) else (f"lr {steps.last:g}",),
    )


def _diverged(history: History) -> Finding | None:
    batches = history.batch_loss if len(history.batch_loss) else history.get("loss")
    series = {"loss": batches, "loss/probe": history.probe_loss}
    state = {name: s for name, s in series.items() if len(s)} | {"norm/parameters": history.get("norm/parameters")}
    end = find_divergence(state, history.steps.astype(int).tolist(), history.ruined)
    return None if end is None else _ended(end, state, history)


def _ended(end: Divergence, state: Mapping[str, Series], history: History) -> Finding:
    if end.blown:
        loss = state[end.blown].finite
        greatest = float(loss.values.max()) / max(abs(loss.first), 1e-30)
        ratio = Evidence(f"{end.blown}, greatest / first", greatest, "above", BLOWN)
        return _finding("The loss has grown far above its start.", [ratio], history, float(end.step))
    verb = "is" if end.what == "loss" else "are"
    evidence = [Evidence(f"{end.what} from step {end.step} on", math.nan, "equal to", math.nan)]
    return _finding(f"The {end.what} {verb} not finite.", evidence, history, float(end.step))


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
