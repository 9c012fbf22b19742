"""Alerts of a run in progress; what an alert is stands in :mod:`gramscope.diagnose.alerts`."""

from collections.abc import Callable, Mapping

from gramscope.diagnose.alerts import Alert as Alert
from gramscope.diagnose.alerts import Series, rules_of
from gramscope.diagnose.alerts import find_alerts as find_alerts


class AlertLog:
    """Alerts of a run in progress; ``tell`` is called once for each kind and series, and once for all not finite."""

    def __init__(self, tell: Callable[[Alert], object]) -> None:
        self.alerts: list[Alert] = []
        self._tell = tell
        self._measured: dict[str, tuple[list[int], list[float]]] = {}

    def measured(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of one measurement."""
        for name in filter(rules_of, scalars):
            steps, values = self._measured.setdefault(name, ([], []))
            steps.append(step)
            values.append(scalars[name])
        self.check(self._measured)

    def check(self, series: Mapping[str, Series]) -> None:
        known = {(alert.what, alert.where) for alert in self.alerts}
        for alert in find_alerts(series):
            if (alert.what, alert.where) not in known:
                once = alert.what != "not finite" or all(other.what != alert.what for other in self.alerts)
                self.alerts.append(alert)
                if once:
                    self._tell(alert)
