"""What is wrong with a run, and what to try: rules on what was recorded. Never imports torch."""

import inspect
import sys
from types import ModuleType

from gramscope.diagnose.finding import Diagnosis, Evidence, Finding
from gramscope.diagnose.rule_registry import RULES, Rule, rule
from gramscope.diagnose.run_diagnosis import diagnose

__all__ = ["RULES", "Diagnosis", "Evidence", "Finding", "Rule", "diagnose", "rule"]


class _Package(ModuleType):
    """``gramscope.diagnose`` is both the package and its entry point, so the package can be called."""

    __signature__ = inspect.signature(diagnose)

    def __call__(self, run: object) -> Diagnosis:
        return diagnose(run)


sys.modules[__name__].__class__ = _Package
