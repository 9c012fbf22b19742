"""Series as healthy and broken runs record them, written by hand: one change for each kind of fault."""

import numpy as np

from gramscope.diagnose.history import History, Series, history_of_records

STEPS = [0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63, 79, 100, 126, 158, 200, 250]
LAYERS = ["0", "2", "4", "6", "8"]
CLASSES = 10
META = {"layers": LAYERS, "parameters": {f"{layer}.weight": [32, 32] for layer in LAYERS}}


def healthy_scalars(step: int) -> dict[str, float]:
    """One record of a classifier of ten classes that learns."""
    fall = np.exp(-step / 60)
    accuracy = 0.1 + 0.85 * (1 - fall)
    found = {
        "loss/probe": 0.2 + 2.1 * fall, "accuracy/probe": accuracy, "kernel/drift": 3.0 * (1 - fall),
        "richness/initial_similarity": 1 - 0.4 * (1 - fall), "norm/parameters": 9.0 + step / 250,
        "gradient_norm": 0.4 + 0.4 * fall, "gradient_given": (0.6 + 0.4 * fall) * (1 + 0.2 * np.sin(step)),
        "gradient_overlap": 0.1 + 0.5 * fall, "gradient_zeros": 0.02, "noise_scale": 40.0 + step,
        "update_size": 0.05, "precision": 1.2e-7,
        "step/error": 0.05, "step/predicted_loss_change": -0.03 * fall, "step/true_loss_change": -0.028 * fall,
        "optimizer/lr": 0.1, "optimizer/lowest_lr": 0.1, "optimizer/weight_decay": 0.0, "optimizer/momentum": 0.0,
        "optimizer/adaptive": 0.0, "optimizer/decoupled": 0.0, "training_mode": 1.0, "dropout": 0.1,
        "outputs/probabilities": 0.0, "outputs/behind_softmax": 2.4 - np.exp(-0.2 - 2.1 * fall),
        "train_mode/loss": 0.25 + 2.1 * fall, "train_mode/accuracy": accuracy - 0.02,
    }  # fmt: skip
    for layer in LAYERS:
        found |= {f"gradient_norm/{layer}": 0.3, f"signal/{layer}": 0.8, f"feature_rank/{layer}": 8.0,
                  f"update_ratio/{layer}": 0.01, f"effective_lr/{layer}": 0.1, f"dead_units/{layer}": 0.05,
                  f"saturated_units/{layer}": 0.01, f"token_variance/{layer}": 0.7}  # fmt: skip
    for c in range(CLASSES):
        found |= {f"class_recall/{c}": accuracy, f"class_predicted/{c}": 0.1}
    if step == 0:
        found |= {"probe/discrete": 0.0, "probe/duplicates": 0.0, "probe/chance_duplicates": 0.0, "probe/rms": 1.0,
                  "probe/mean_over_std": 0.1, "probe/scale_spread": 5.0, "probe/classes": 10.0,
                  "probe/target_rank": 9.0, "probe/chance": 2.3, "probe/neighbors_agree": 0.9, "probe/outputs": 10.0,
                  "outputs/not_affine": 0.4, "outputs/rms": 0.5, "probe/targets_rms": 1.0,
                  "probe/targets_mean": 0.2}  # fmt: skip
        for name in ("update_size", "gradient_given", "gradient_overlap", "gradient_zeros"):
            del found[name]
    return found


def batch_losses(steps: int = 250) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (0.2 + 2.1 * np.exp(-np.arange(1, steps + 1) / 60)) * rng.uniform(0.8, 1.2, steps)


def history(change=None, losses: np.ndarray | None = None, logged=None) -> History:
    """The healthy run, with ``change(step, scalars)`` applied to every record."""
    rows = []
    for step in STEPS:
        scalars = healthy_scalars(step)
        if change is not None:
            change(step, scalars)
        rows.append((step, scalars))
    values = batch_losses() if losses is None else losses
    series = {"loss": Series(np.arange(1.0, len(values) + 1), values), **(logged or {})}
    return history_of_records(rows, series, META)


def _set(**values):
    """Series under new values: numbers, or functions of the step; ``__`` is a slash, ``__all`` means every layer."""

    def change(step, scalars):
        for name, value in values.items():
            prefix, _, part = name.partition("__")
            targets = [f"{prefix}/{layer}" for layer in LAYERS] if part == "all" else [name.replace("__", "/")]
            for target in targets:
                if step == 0 and target not in scalars and not target.startswith("probe"):
                    continue
                if target.startswith("probe") and step:
                    continue
                scalars[target] = float(value(step) if callable(value) else value)

    return change


def _stuck(step, scalars):
    scalars["loss/probe"] = scalars["train_mode/loss"] = 2.3
    scalars["accuracy/probe"] = scalars["train_mode/accuracy"] = 0.1


def _both(*changes):
    def change(step, scalars):
        for one in changes:
            one(step, scalars)

    return change


def _by_layer(prefix, sizes):
    def change(step, scalars):
        for layer, size in zip(LAYERS, sizes, strict=True):
            scalars[f"{prefix}/{layer}"] = size

    return change


def _in_order(step, scalars):
    leader = step // 30 % CLASSES
    scalars["loss/probe"] = 2.3 + min(step, 1) * 2.7
    for c in range(CLASSES):
        scalars[f"class_predicted/{c}"] = 0.91 if c == leader else 0.01


def _missing(step, scalars):
    scalars["class_recall/3"] = scalars["class_predicted/3"] = 0.0
    scalars["loss/probe"] += 0.003 * step  # its examples cost more and more


def _early(name, value):
    """A number of the first record alone, where it is there."""

    def change(step, scalars):
        if name in scalars:
            scalars[name] = value

    return change


def _bounded(step):
    """Cross-entropy of the softmax of a softmax, of ten classes: between 1.461 and 2.461."""
    return 1.5 + 0.8 * np.exp(-step / 60)


def _rising(step):
    return 2.3 + step / 50


FLAT = np.full(250, 2.3) * np.random.default_rng(1).uniform(0.95, 1.05, 250)


def _spiked() -> np.ndarray:
    losses = batch_losses()
    losses[60::40] = 9.0
    return losses


TEST_STEPS = np.arange(25.0, 251.0, 25.0)

BROKEN = {
    "frozen_layer": lambda: history(_set(frozen__2=1.0)),
    "not_in_optimizer": lambda: history(_set(optimizer__lr=0.1, not_optimized__2=1.0)),
    "gradients_not_zeroed": lambda: history(_set(gradient_overlap=0.98, gradient_given=lambda s: 0.5 * s)),
    "wrong_mode": lambda: history(_set(training_mode=lambda s: float(s < 5))),
    "head_only": lambda: history(
        _both(_by_layer("update_ratio", [1e-6] * 4 + [0.01]), _by_layer("effective_lr", [1e-5] * 4 + [0.1]))),
    "inputs_not_normalized": lambda: history(_set(probe__rms=110.0, probe__mean_over_std=2.0, signal__all=60.0)),
    "class_missing": lambda: history(_missing),
    "classes_in_order": lambda: history(_in_order, losses=np.full(250, 0.1)),
    "labels": lambda: history(_both(_stuck, _set(probe__neighbors_agree=0.0)), losses=FLAT),
    "half_precision": lambda: history(_both(_stuck, _set(precision=7.8e-3, update_ratio__all=1e-3)), losses=FLAT),
    "weight_decay_too_strong": lambda: history(
        _both(_stuck, _set(optimizer__weight_decay=0.5, norm__parameters=lambda s: 9 * np.exp(-s / 40))), losses=FLAT),
    "clipping_always": lambda: history(_set(gradient_given=0.01)),
    "exploding_signals": lambda: history(_by_layer("signal", [1.0, 10.0, 100.0, 1e3, 1e4])),
    "vanishing_signals": lambda: history(
        _both(_stuck, _by_layer("gradient_norm", [1e-6, 1e-5, 1e-3, 1e-2, 0.3])), losses=FLAT),
    "dead_units": lambda: history(_set(dead_units__2=0.95)),
    "saturated_units": lambda: history(_set(saturated_units__2=0.9)),
    "lr_too_large": lambda: history(_both(_stuck, _set(step__true_loss_change=3.0, step__error=4.0)), losses=FLAT),
    "lr_too_small": lambda: history(
        _both(_stuck, _set(update_ratio__all=1e-5, step__error=1e-4, kernel__drift=1e-3)), losses=FLAT),
    "batch_too_small": lambda: history(_set(gradient_overlap=0.02, gradient_given=3.0, noise_scale=60.0)),
    "oversmoothing": lambda: history(
        _both(_stuck, _by_layer("token_variance", [0.9, 0.3, 0.05, 0.01, 0.002])), losses=FLAT),
    "rank_collapse": lambda: history(_set(feature_rank__all=lambda s: 1.2 if s else 6.0, loss__probe=1.9), losses=FLAT),
    "lazy": lambda: history(_set(kernel__drift=0.03, richness__initial_similarity=0.999)),
    "memorization": lambda: history(
        _set(loss__probe=_rising, train_mode__loss=_rising, probe__discrete=1.0), losses=batch_losses() - 0.15),
    "loss_spikes": lambda: history(losses=_spiked()),
    "doubled_examples": lambda: history(_set(probe__duplicates=0.3)),
    "softmax_twice": lambda: history(
        _both(_set(outputs__probabilities=1.0, loss__probe=_bounded), _early("outputs/probabilities", 1.0)),
        losses=np.array([_bounded(step) for step in range(1, 251)])),
    "no_activation": lambda: history(_early("outputs/not_affine", 3e-7)),
    "dropout_too_strong": lambda: history(_set(dropout=0.9)),
    "momentum_too_large": lambda: history(_set(optimizer__momentum=1.0)),
    "targets_not_normalized": lambda: history(
        _set(probe__targets_rms=5e3, probe__targets_mean=5e3, probe__chance=1e6, loss__probe=lambda s: 2.6e7 - s),
        losses=2.6e7 - np.arange(250.0)),
    "constant_probe": lambda: history(_set(probe__classes=1.0)),
    "not_a_number": lambda: history(
        _set(loss__probe=lambda s: np.nan if s > 90 else 2.0, norm__parameters=lambda s: np.nan if s > 90 else 9.0),
        losses=np.where(np.arange(250) < 90, batch_losses(), np.nan)),
}  # fmt: skip
