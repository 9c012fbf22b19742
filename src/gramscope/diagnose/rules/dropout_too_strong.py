"""Dropout that leaves next to nothing."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import rule
from gramscope.diagnose.rules.wrong_mode import DROPOUT

MOST = 0.8  # of the units of a layer


@rule(
    "dropout_too_strong",
    needs=((("dropout",), DROPOUT),),
    explains=("labels", "lr_too_small", "lr_too_large", "rank_collapse", "batch_too_small", "class_missing",
              "vanishing_signals", "loss_spikes", "oversmoothing", "memorization"),
    order=0,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """A module of the network leaves out four fifths of its units or more: an attribute, hence a fact.

    What is kept is scaled by ``1/(1 - p)``, so the variance of a sum over units grows by ``p/(1 - p)``: 4 at p = 0.8.
    The usual 0.1 to 0.5 adds at most 1 (Srivastava et al., Dropout, 2014). A frequent mistake is the share to keep in
    place of the share to leave out.
    """
    share = history.get("dropout").last
    if not share >= MOST:
        return None
    return Finding(
        "dropout_too_strong",
        f"Dropout leaves out {100 * share:.0f} % of the units of a layer.",
        (Evidence("dropout", share, "above", MOST),),
        "p is the share that is left out; perhaps the share to keep was given.",
        f"Set p to {min(0.5, 1 - share):.2g} or less.",
        step=history.step_of(0),
    )
