"""One file a rule; importing this package registers them all."""

from importlib import import_module

KINDS = (
    "frozen_layer", "not_in_optimizer", "gradients_not_zeroed", "wrong_mode", "head_only", "inputs_not_normalized",
    "class_missing", "classes_in_order", "labels", "half_precision", "weight_decay_too_strong", "clipping_always",
    "exploding_signals", "vanishing_signals", "dead_units", "saturated_units", "lr_too_large", "lr_too_small",
    "batch_too_small", "oversmoothing", "rank_collapse", "lazy", "memorization", "loss_spikes", "doubled_examples",
    "softmax_twice", "no_activation", "dropout_too_strong", "momentum_too_large", "targets_not_normalized",
    "constant_probe", "not_a_number",
)  # fmt: skip

for kind in KINDS:
    import_module(f"{__name__}.{kind}")
