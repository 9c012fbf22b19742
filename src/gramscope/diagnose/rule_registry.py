"""A rule: a pure function of what was recorded, with what it needs and which other findings it explains."""

from collections.abc import Callable
from dataclasses import dataclass

from gramscope.diagnose.finding import Finding
from gramscope.diagnose.history import History

Find = Callable[[History], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One thing that may be wrong with a run, and how to find it. See :func:`rule`.

    ``needs``: groups of series, of each of which at least one must be recorded, with what to do where none is.
    ``explains``: kinds that are consequences of this one. ``order``: of two findings that do not explain one another
    the lower comes first: set-up (0), data and start (1), steps (2), network (3), outcome (4).

    >>> Rule("never", lambda history: None, needs=(), explains=frozenset(), order=3).kind
    'never'
    """

    kind: str
    find: Find
    needs: tuple[tuple[tuple[str, ...], str], ...]
    explains: frozenset[str]
    order: int

    def lacks(self, history: History) -> str:
        """Why this rule cannot judge, or an empty string."""
        for names, advice in self.needs:
            if not any(_recorded(history, name) for name in names):
                if history.all_frozen and not advice.startswith(NOT_NEEDED):
                    return "not measured, since all parameters are frozen"
                advice = advice if "precision" in history.measured else _with_measures(advice)
                return advice.replace(MEASURES, _of_version(history.other_version))
        return ""


def _with_measures(advice: str) -> str:
    """Where even the set-up was not recorded, nobody knows what the network has: more than one thing may be lacking."""
    return MEASURES if advice == MEASURES or advice.startswith(NOT_NEEDED) else f"{advice}; {MEASURES}"


def _of_version(other: str) -> str:
    return f"gramscope {other}, which recorded this run, may not have measured it; or {MEASURES}" if other else MEASURES


def _recorded(history: History, name: str) -> bool:
    if name == "batch loss":
        return len(history.batch_loss) > 0
    if name == "refused numbers":
        return len(history.ruined) > 0
    return bool(history.family(name[:-2])) if name.endswith("/*") else name in history.measured


RULES: dict[str, Rule] = {}

OPTIMIZER = "show the optimiser whose step() the loop calls: scope.use(optimizer)"
TARGETS = "pass a probe with targets: probe=(x, y)"
LOSS = "log the loss: scope.step(loss=loss)"
LABELS = "pass a probe with a class label for each example"
CHANCE = "with a loss= of your own it is not known what the best constant outputs cost"
NOT_NEEDED = "not needed: "
MEASURES = "leave measures= at its default"


def rule(
    kind: str,
    *,
    needs: tuple[tuple[tuple[str, ...], str], ...] = (),
    explains: tuple[str, ...] = (),
    order: int = 3,
) -> Callable[[Find], Find]:
    """Register a rule under the name of what it finds; the function gets the run's history.

    >>> @rule("loss_above_100", needs=((("loss/probe",), TARGETS),))
    ... def loss_above_100(history):
    ...     return None  # or a Finding
    >>> RULES.pop("loss_above_100").order  # here it is removed again
    3
    """

    def register(find: Find) -> Find:
        RULES[kind] = Rule(kind, find, needs, frozenset(explains), order)
        return find

    return register
