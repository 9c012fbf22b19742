"""Examples of the probe that occur twice."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import MEASURES, rule

SHARE = 0.02


@rule("doubled_examples", needs=((("probe/duplicates",), MEASURES),), order=4)
def find(history: History) -> Finding | None:
    """More than 2 % of the probe equals an earlier example in every entry, four times what chance would give.

    Whether the probe occurs among the training examples cannot be seen from here: the watch does not see batches.
    """
    share = history.value("probe/duplicates")
    if not share > SHARE or history.value("probe/chance_duplicates") > share / 4:
        return None
    return Finding(
        "doubled_examples",
        f"{100 * share:.0f} % of the probe's examples occur twice.",
        (Evidence("probe/duplicates", share, "above", SHARE),),
        "The data set holds copies, and a random split then puts some into both parts.",
        "Remove copies before the data are split.",
        ("probe",),
    )
