"""What a measure would be of a network that has learnt nothing: computed from the sizes that the run holds."""

import math
from collections.abc import Mapping

from gramscope.report.view import RunView


def shape_of(view: RunView, weight: str) -> list[int] | None:
    parameters = view.meta.get("parameters")
    shape = parameters.get(weight) if isinstance(parameters, Mapping) else None
    return shape if isinstance(shape, list) and all(isinstance(size, int) for size in shape) else None


def _fact(view: RunView, name: str) -> int | None:
    probe = view.meta.get("probe")
    value = probe.get(name) if isinstance(probe, Mapping) else None
    return value if isinstance(value, int) and value > 0 else None


def last_layer(view: RunView) -> tuple[int, int] | None:
    """Outputs C and features p of the last matrix; of a classifier the last one with a row for each class."""
    parameters = view.meta.get("parameters")
    shapes = [shape_of(view, name) for name in parameters] if isinstance(parameters, Mapping) else []
    matrices = [(shape[0], shape[1]) for shape in shapes if shape is not None and len(shape) == 2]
    classes = _fact(view, "classes")
    fitting = [shape for shape in matrices if classes is None or shape[0] == classes]
    return fitting[-1] if fitting else None


def lazy_richness(view: RunView) -> float | None:
    """``1 - √(C/p)``: D_LR of p white features that an arbitrary readout turns into C outputs (docs/richness.md)."""
    found = last_layer(view)
    if found is None:
        return None
    outputs, features = found
    return 1 - math.sqrt(outputs / features) if 0 < outputs < features else None
