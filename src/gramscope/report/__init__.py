"""The page about a run: figures, words, files and a live server. Never imports torch."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gramscope.report.page import report
from gramscope.report.server import ReportServer, serve

__all__ = ["ReportServer", "report", "serve"]


class _CallableReport(ModuleType):
    """``gramscope.report`` is both the package and its entry point, so the package can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableReport
