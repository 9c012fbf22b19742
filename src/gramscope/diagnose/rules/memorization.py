"""The training examples are learnt, and nothing else yet: grokking in progress, or labels that mean nothing."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.progress import end_of, removed_in_batches
from gramscope.diagnose.rule import LOSS, TARGETS, rule

FITTED = 0.9  # of the batches' loss is gone
FEW = 6


@rule(
    "memorization", needs=((("loss/probe",), TARGETS), (("batch loss",), LOSS), (("probe/chance",), TARGETS)), order=3
)
def find(history: History) -> Finding | None:
    """The batches' loss is gone by 90 %, and the probe's is no better than that of the best constant outputs.

    So far this is what grokking looks like before it generalises (Power et al., arXiv:2201.02177); labels without a
    rule look the same. What may tell them apart is whether the inputs are tokens.
    """
    fitted, chance, probe = removed_in_batches(history), history.value("probe/chance"), end_of(history.probe_loss)
    if len(history.steps) < FEW or not (fitted > FITTED and probe > chance):
        return None
    return Finding(
        "memorization",
        "The training examples are learnt, and the probe is no better than chance.",
        (Evidence("part of the batches' first loss that is gone", fitted, "above", FITTED),
         Evidence("loss/probe against chance", probe / max(chance, 1e-30), "above", 1.0)),
        "The network memorises: few examples, or a rule that it finds late (grokking).",
        "Go on training with more weight decay (try 1.0 with AdamW), and with more training examples if there are any.",
        alternatives=("labels that do not belong to their inputs", "a probe of other data"),
        step=float(history.steps[FEW - 1]),
    )  # fmt: skip
