"""matplotlib, which only pictures need."""

from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # an optional extra, so that its classes cannot be named while it is not there
    Axes = Figure = object


def load_pyplot() -> ModuleType:
    """``matplotlib.pyplot``, or an error that says how to get it."""
    try:
        from matplotlib import pyplot as found
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'gramscope[plot]'") from error
    return found


def figure_of(axes: Axes) -> Figure:
    """The figure that the axes are in."""
    return cast("Figure", axes.figure)
