"""Training in evaluation mode, or evaluation in training mode."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, Series
from gramscope.diagnose.rule_registry import NOT_NEEDED, rule

GAP = 0.03  # of accuracy: more than one evaluation may differ by chance
TESTS = ("test", "val", "eval", "valid")
FEW = 3
DROPOUT = f"{NOT_NEEDED}the network has neither dropout nor batch norm"


@rule("wrong_mode", needs=((("training_mode",), DROPOUT),), explains=("loss_spikes", "labels"), order=0)
def find(history: History) -> Finding | None:
    """Dropout and batch norm do one thing in training and another in evaluation.

    Left off: from some step on, all such modules were in evaluation mode when the optimiser stepped: a fact. Left on: a
    logged accuracy of held-out examples lies nearer to the probe's accuracy in training mode than to that in
    evaluation mode, where the two differ.
    """
    mode = history.get("training_mode").finite.since(1.0)
    trained = np.flatnonzero(mode.values)
    off = mode.steps[trained[-1] + 1 if len(trained) else 0 :]
    if len(off) >= FEW:
        return Finding(
            "wrong_mode",
            "The network trains in evaluation mode: dropout is off, and batch norm does not see the batches.",
            (Evidence("measurements at the end with training_mode 0", float(len(off)), "above", FEW - 1.0),),
            "model.eval() was called for an evaluation, and model.train() was not called after it.",
            "Call model.train() at the start of every epoch. A shallow network may learn as well without for a while.",
            step=float(off[0]),
        )
    return _evaluated_in_training(history)


def _evaluated_in_training(history: History) -> Finding | None:
    training, evaluation = history.get("train_mode/accuracy").finite, history.get("accuracy/probe").finite
    for name, logged in history.logged.items():
        if (
            not ("acc" in name and any(part in name for part in TESTS))
            or len(logged.finite) < FEW
            or len(training) < FEW
        ):
            continue
        known = logged.finite.since(training.steps[0])
        as_trained, as_evaluated = (_between(known, s) for s in (training, evaluation))
        gap, apart = float(np.median(as_evaluated - as_trained)), float(np.median(as_evaluated - known.values))
        nearer = np.abs(known.values - as_trained) < np.abs(known.values - as_evaluated)
        if gap > GAP and apart > gap / 2 and float(nearer.mean()) > 0.6:
            return Finding(
                "wrong_mode",
                f"{name} is measured in training mode: it follows the probe's accuracy in that mode.",
                (Evidence("accuracy lost by training mode", gap, "above", GAP),
                 Evidence(f"accuracy lost by {name}", apart, "above", gap / 2)),
                "The evaluation runs without model.eval().",
                "Call model.eval() before the evaluation and model.train() after it.",
                (name,),
                float(known.steps[min(FEW, len(known)) - 1]),
            )  # fmt: skip
    return None


def _between(at: Series, series: Series) -> np.ndarray:
    """A series at other steps, by straight lines in the step."""
    return np.asarray(np.interp(at.steps, series.steps, series.values))
