"""matplotlib, which only pictures need."""

from types import ModuleType


def load_pyplot() -> ModuleType:
    """``matplotlib.pyplot``, or an error that says how to get it."""
    try:
        from matplotlib import pyplot as found
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'gramscope[plot]'") from error
    return found
