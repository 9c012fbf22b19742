"""How often each finding was right on runs of known faults, held out (benchmarks/diagnosis.py)."""

# kind: (times that it was named first and was right, times that it was named first)
COUNTS: dict[str, tuple[int, int]] = {
    "batch_too_small": (14, 14),
    "class_missing": (15, 15),
    "classes_in_order": (9, 9),
    "clipping_always": (10, 10),
    "dead_units": (15, 20),
    "doubled_examples": (15, 15),
    "exploding_signals": (14, 20),
    "frozen_layer": (20, 20),
    "gradients_not_zeroed": (20, 20),
    "half_precision": (12, 12),
    "head_only": (20, 20),
    "inputs_not_normalized": (15, 15),
    "labels": (19, 25),
    "lazy": (0, 0),
    "loss_spikes": (20, 20),
    "lr_too_large": (14, 14),
    "lr_too_small": (14, 24),
    "memorization": (10, 10),
    "not_in_optimizer": (20, 20),
    "nothing_wrong": (439, 456),
    "oversmoothing": (5, 5),
    "rank_collapse": (10, 16),
    "saturated_units": (10, 11),
    "vanishing_signals": (9, 9),
    "weight_decay_too_strong": (20, 20),
    "wrong_mode": (10, 10),
}


def confidence(kind: str) -> float:
    """Share of right findings, ``(right + 1) / (named + 2)``; NaN for a kind that was never tried.

    >>> confidence("a rule of your own")
    nan
    """
    if kind not in COUNTS:
        return float("nan")
    right, named = COUNTS[kind]
    return (right + 1) / (named + 2)
