"""What is told of a run in progress: alerts at once, and the diagnosis so far."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np
from torch import nn

from gramscope.capture.network import named_parameters
from gramscope.diagnose.alerts import Alert, find_alerts, rules_of
from gramscope.diagnose.alerts import Series as AlertSeries
from gramscope.diagnose.finding import NOTHING_WRONG, Diagnosis, Finding
from gramscope.diagnose.history import Series, history_of_records
from gramscope.diagnose.loss_of_probe import loss_of_another_kind
from gramscope.diagnose.ranking import diagnosis_of
from gramscope.record.subject import layer_of


class MeasuredStep(TypedDict):
    """What ``scope.records`` holds of each measurement."""

    step: int
    scalars: dict[str, float]
    failures: dict[str, str]
    skipped: list[str]


SURE = 0.8  # findings that were right less often are in ``scope.findings``, and nobody is told


def diagnosis_so_far(
    model: nn.Module, records: Sequence[MeasuredStep], logged: Mapping[str, Mapping[int, float]]
) -> Diagnosis:
    """The findings of what was measured and logged up to now."""
    shapes = {name: list(parameter.shape) for name, parameter in named_parameters(model).items()}
    meta = {"layers": list(dict.fromkeys(map(layer_of, shapes))), "parameters": shapes}
    rows = [(record["step"], record["scalars"]) for record in records]
    return diagnosis_of(history_of_records(rows, _series(logged), meta), type(model).__name__)


def other_loss_so_far(records: Sequence[MeasuredStep], logged: Mapping[str, Mapping[int, float]]) -> str:
    """Why the probe's loss is not the one that is trained on, as far as the first measurements tell."""
    rows = [(record["step"], record["scalars"]) for record in records]
    return loss_of_another_kind(history_of_records(rows, _series(logged), {}))


def _series(logged: Mapping[str, Mapping[int, float]]) -> dict[str, Series]:
    return {
        name: Series(np.array([*found], dtype=float), np.array([*found.values()])) for name, found in logged.items()
    }


class FindingLog:
    """Tells each cause once, as an alert, when two measurements in a row name it first."""

    def __init__(self, tell: Callable[[Alert], object]) -> None:
        self._tell, self._told, self._last = tell, set[str](), ""

    def look(self, found: Diagnosis, step: int) -> None:
        first: Finding = found[0]
        again, self._last = first.kind == self._last, first.kind
        if again and first.kind not in self._told and first.kind != NOTHING_WRONG and first.confidence >= SURE:
            self._told.add(first.kind)
            value, threshold = (first.evidence[0].value, first.evidence[0].threshold) if first.evidence else (0.0, 0.0)
            where = ", ".join(first.where) or first.kind
            self._tell(Alert(first.kind, where, step, value, threshold, f"{first.what} Try first: {first.remedy}"))


class AlertLog:
    """Alerts of a run in progress; ``tell`` is called once for each kind and series, and once for all not finite."""

    def __init__(self, tell: Callable[[Alert], object]) -> None:
        self.alerts: list[Alert] = []
        self._tell = tell
        self._measured: dict[str, tuple[array[int], array[float]]] = {}
        self.ignored = set[str]()  # series that say nothing of this run

    def measured(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of one measurement."""
        for name in (name for name in scalars if name not in self.ignored and rules_of(name)):
            steps, values = self._measured.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            values.append(scalars[name])
        self.check(self._measured)

    def check(self, series: Mapping[str, AlertSeries]) -> None:
        known = {(alert.what, alert.where) for alert in self.alerts}
        for alert in find_alerts(series):
            if (alert.what, alert.where) not in known:
                once = alert.what != "not finite" or all(other.what != alert.what for other in self.alerts)
                self.alerts.append(alert)
                if once:
                    self._tell(alert)
