"""Sizes by depth, as the rules on exploding and vanishing signals see them."""

import numpy as np

from gramscope.diagnose.history import History, Numbers

FEW_LAYERS = 4
COPIES = 1.01  # effective rank of units that are the same up to a factor


def early(history: History, prefix: str) -> tuple[list[str], Numbers]:
    """Layers in order and their first values, of a family of norms or sizes: later ones are the steps' doing."""
    known = {layer: s for layer, s in history.family(prefix).items() if len(s.finite)}
    return list(known), np.array([series.first for series in known.values()])


def copies(history: History) -> bool:
    """Whether the units of most layers are copies of one another from the start on: effective rank one."""
    ranks = early(history, "feature_rank")[1]
    return len(ranks) > 0 and float(np.median(ranks)) < COPIES


def slope(sizes: Numbers) -> float:
    """Factor from one layer to the next, by least squares on the logarithms; 1 where it cannot be told."""
    if len(sizes) < FEW_LAYERS or not (sizes > 0).all():
        return 1.0
    place = np.arange(len(sizes)) - (len(sizes) - 1) / 2
    logs = np.log(sizes)
    return float(np.exp((place * logs).sum() / (place**2).sum()))
