"""How often each finding was right on runs of known faults (benchmarks/diagnosis.py; docs/diagnosis.md has the rates).

The third, the tenth and the eleventh set, by the rules as they are, some of which were repaired in view of these runs;
and draw 1118, held out.
"""

# kind: (times that it was named first and was right, times that it was named first)
COUNTS: dict[str, tuple[int, int]] = {
    "batch_too_small": (37, 37),
    "class_missing": (34, 37),
    "classes_in_order": (35, 35),
    "clipping_always": (25, 25),
    "constant_probe": (31, 31),
    "dead_units": (35, 37),
    "doubled_examples": (33, 33),
    "dropout_too_strong": (35, 35),
    "exploding_signals": (32, 34),
    "frozen_layer": (45, 45),
    "gradients_not_zeroed": (44, 44),
    "half_precision": (35, 35),
    "head_only": (45, 46),
    "inputs_not_normalized": (36, 36),
    "labels": (39, 41),
    "lazy": (13, 13),
    "loss_spikes": (39, 42),
    "lr_too_large": (48, 50),
    "lr_too_small": (48, 55),
    "memorization": (23, 23),
    "momentum_too_large": (25, 25),
    "no_activation": (16, 16),
    "not_a_number": (31, 31),
    "not_in_optimizer": (45, 45),
    "nothing_wrong": (1120, 1150),
    "oversmoothing": (10, 10),
    "rank_collapse": (35, 35),
    "saturated_units": (30, 32),
    "softmax_twice": (34, 36),
    "targets_not_normalized": (14, 14),
    "vanishing_signals": (19, 19),
    "weight_decay_too_strong": (41, 41),
    "wrong_mode": (24, 24),
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
