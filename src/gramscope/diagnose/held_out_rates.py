"""How often each finding was right on runs of known faults, held out (benchmarks/diagnosis.py, the third set)."""

# kind: (times that it was named first and was right, times that it was named first)
COUNTS: dict[str, tuple[int, int]] = {
    "batch_too_small": (18, 18),
    "class_missing": (9, 10),
    "classes_in_order": (14, 14),
    "clipping_always": (10, 10),
    "constant_probe": (11, 11),
    "dead_units": (15, 15),
    "doubled_examples": (14, 14),
    "dropout_too_strong": (12, 12),
    "exploding_signals": (15, 15),
    "frozen_layer": (20, 20),
    "gradients_not_zeroed": (20, 20),
    "half_precision": (10, 10),
    "head_only": (20, 20),
    "inputs_not_normalized": (15, 15),
    "labels": (16, 16),
    "lazy": (5, 5),
    "loss_spikes": (20, 20),
    "lr_too_large": (20, 20),
    "lr_too_small": (19, 24),
    "memorization": (6, 6),
    "momentum_too_large": (7, 7),
    "no_activation": (8, 8),
    "not_a_number": (8, 8),
    "not_in_optimizer": (20, 20),
    "nothing_wrong": (431, 455),
    "oversmoothing": (5, 5),
    "rank_collapse": (10, 14),
    "saturated_units": (15, 30),
    "softmax_twice": (13, 13),
    "targets_not_normalized": (5, 5),
    "vanishing_signals": (6, 6),
    "weight_decay_too_strong": (20, 20),
    "wrong_mode": (8, 8),
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
