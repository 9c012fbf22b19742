"""A probe whose targets are all the same."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import CHANCE, TARGETS, rule

ONE = 1.0


@rule(
    "constant_probe",
    needs=((("probe/target_rank",), TARGETS), (("probe/classes", "probe/chance"), CHANCE)),
    explains=("doubled_examples", "class_missing", "classes_in_order", "labels", "memorization", "rank_collapse",
              "batch_too_small"),
    order=1,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """All labels of the probe are of one class, or all its targets one number: what it measures says little.

    A fact. It comes about where the examples are sorted and the first or the last of them are held out.
    """
    classes, chance = history.value("probe/classes"), history.value("probe/chance")
    if not (classes == ONE or chance == 0.0):
        return None
    name, value = ("probe/classes", ONE) if classes == ONE else ("probe/chance", 0.0)
    return Finding(
        "constant_probe",
        "All targets of the probe are the same.",
        (Evidence(name, value, "equal to", value),),
        "The probe has very few examples, or the data are sorted by class and it is the beginning or the end of them.",
        "Take the probe from shuffled examples, some of each class. If all targets are meant to be one (of a GAN's "
        "generator, say), ignore this.",
        ("probe",),
    )
