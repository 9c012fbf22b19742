"""Sizes by depth, as the rules on exploding and vanishing signals see them."""

import numpy as np

from gramscope.diagnose.history import History, Numbers

FEW_LAYERS = 4


def early(history: History, prefix: str) -> tuple[list[str], Numbers]:
    """Layers in order and the median of their first three values; of a family of norms or sizes."""
    layers, sizes = [], []
    for layer, series in history.family(prefix).items():
        if len(series.finite):
            layers.append(layer)
            sizes.append(float(np.median(series.finite.values[:3])))
    return layers, np.array(sizes)


def slope(sizes: Numbers) -> float:
    """Factor from one layer to the next, by least squares on the logarithms; 1 where it cannot be told."""
    if len(sizes) < FEW_LAYERS or not (sizes > 0).all():
        return 1.0
    place = np.arange(len(sizes)) - (len(sizes) - 1) / 2
    logs = np.log(sizes)
    return float(np.exp((place * logs).sum() / (place**2).sum()))
