"""Capture of weight sites: the one place that watches a network run."""

import inspect
import sys
from types import ModuleType
from typing import Any

from gramscope.capture.capturing import capture
from gramscope.capture.sites import LookupSite, OuterSite, RowSite, Site, Snapshot

__all__ = ["LookupSite", "OuterSite", "RowSite", "Site", "Snapshot", "capture"]


class _CallablePackage(ModuleType):
    """``gramscope.capture`` is both the package and its entry point, so the package can be called."""

    __signature__ = inspect.signature(capture)

    def __call__(self, *args: Any, **kwargs: Any) -> Snapshot:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
