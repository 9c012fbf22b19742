"""Beyond one machine's memory and one run: sketches of gradients, sweeps of runs."""

from typing import TYPE_CHECKING

from gramscope.base.lazy import lazy_names

if TYPE_CHECKING:
    from gramscope.scale.sketch_files import load_sketch as load_sketch
    from gramscope.scale.sketch_result import Estimate as Estimate
    from gramscope.scale.sketch_result import Sketch as Sketch
    from gramscope.scale.sketch_stream import sketch as sketch

_NAMES = {
    "Estimate": "sketch_result",
    "Sketch": "sketch_result",
    "load_sketch": "sketch_files",
    "sketch": "sketch_stream",
}

__all__ = ["Estimate", "Sketch", "load_sketch", "sketch"]

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
