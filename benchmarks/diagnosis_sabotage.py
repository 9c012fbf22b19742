"""What goes wrong in each kind of sabotaged run, and what the first remedy of its finding changes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diagnosis_training import Setup

Changes = Mapping[str, Any]
NETWORKS = ("mlp", "cnn", "transformer", "recurrent")
BASES: dict[str, dict[str, Setup]] = {
    "calibration": {
        "mlp": Setup(),
        "cnn": Setup("cnn", "images", width=8, steps=200),
        "transformer": Setup("transformer", "majority", norm=True, optimizer="adam", lr=3e-3, width=24, steps=200),
        "recurrent": Setup("gru", "memory", width=24, optimizer="adam", lr=5e-3, batch=32, steps=250),
    },
    "holdout": {
        "mlp": Setup(width=48, depth=3, optimizer="momentum", lr=0.03, batch=48),
        "cnn": Setup("cnn", "images", width=12, depth=3, optimizer="adam", lr=3e-3, batch=48, steps=160),
        "transformer": Setup(
            "transformer", "third", norm=True, post_norm=True, depth=3, optimizer="adamw", lr=2e-3, width=16,
            weight_decay=0.01, steps=220,
        ),
        "recurrent": Setup("lstm", "memory", width=32, optimizer="adam", lr=1e-2, batch=32, steps=250),
    },
    "third": {
        "mlp": Setup(task="fashion", width=64, depth=3, optimizer="adam", lr=2e-3, batch=48, steps=220),
        "cnn": Setup("strided", "fashion_images", width=12, depth=3, optimizer="adam", lr=5e-3, steps=200),
        "transformer": Setup("causal", "marked", norm=True, optimizer="adam", lr=4e-3, width=20, steps=220),
        "recurrent": Setup("gru2", "flip_flop", width=24, optimizer="adam", lr=5e-3, batch=32, steps=250),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sabotage:
    """``where``: changes of the healthy setup by network. ``remedy``: what the first advice changes then.

    A number under "*lr" multiplies the learning rate. ``odd``: other changes for odd seeds.
    """

    kind: str
    where: Mapping[str, Changes]
    remedy: Changes
    odd: Mapping[str, Changes] | None = None


def _all(**changes: Any) -> dict[str, Changes]:
    return dict.fromkeys(NETWORKS, changes)


def _in(networks: str, **changes: Any) -> dict[str, Changes]:
    return dict.fromkeys(networks.split(), changes)


FEED = "mlp cnn transformer"
SABOTAGES = [
    Sabotage("lr_too_small", _all(**{"*lr": 1 / 300}), {"*lr": 100}),
    Sabotage(
        "lr_too_large",
        _in("mlp cnn", **{"*lr": 60}) | _in("transformer recurrent", **{"*lr": 150}),
        {"*lr": 0.1},
        _in("mlp cnn", **{"*lr": 200}) | _in("transformer recurrent", **{"*lr": 50}),
    ),
    Sabotage(
        "exploding_signals",
        _in("mlp cnn", depth=7, hidden_scale=6.0) | _in("transformer", norm=False, hidden_scale=6.0, depth=3),
        {"hidden_scale": 1.6},
    ),
    Sabotage("vanishing_signals", _in("mlp cnn", depth=8, hidden_scale=0.4), {"norm": True},
             _in("mlp cnn", depth=8, activation="sigmoid")),
    Sabotage("dead_units", _in(FEED, hidden_bias=-6.0), {"hidden_bias": 0.0}),
    Sabotage(
        "saturated_units",
        _in("mlp cnn", activation="tanh", hidden_scale=30.0) | _in("recurrent", hidden_scale=15.0),
        {"hidden_scale": 1.0},
    ),
    Sabotage("frozen_layer", _all(frozen=True), {"frozen": False}),
    Sabotage("not_in_optimizer", _all(missing=True), {"missing": False}),
    Sabotage("gradients_not_zeroed", _all(zero_grad=False), {"zero_grad": True}),
    Sabotage(
        "lazy", _in("mlp cnn", output_scale=100.0, optimizer="sgd", lr=1e-5), {"output_scale": 1.0, "lr": 0.1}
    ),
    Sabotage("head_only", _all(body_lr=1e-4), {"body_lr": 1.0}),
    Sabotage(
        "weight_decay_too_strong",
        _in("mlp cnn", weight_decay=0.5) | _in("transformer recurrent", weight_decay=30.0, optimizer="adamw"),
        {"weight_decay": 0.0},
        _in("mlp cnn", weight_decay=0.3) | _in("transformer recurrent", weight_decay=0.3, optimizer="adam"),
    ),
    Sabotage(
        "labels", _all(noise=1.0), {"noise": 0.0},
        _in(FEED, noise=0.6, noisy_probe=False) | _in("recurrent", noise=1.0, noisy_probe=False),
    ),
    Sabotage("class_missing", _in(FEED, missing_class=3), {"missing_class": None}),
    Sabotage("classes_in_order", _in(FEED, in_order=True), {"in_order": False}),
    Sabotage(
        "inputs_not_normalized",
        _in("mlp cnn recurrent", input_scale=50.0, input_shift=100.0),
        {"input_scale": 1.0, "input_shift": 0.0},
    ),
    Sabotage(  # copies mislead where examples are memorised: few of them, and many steps
        "doubled_examples", _in(FEED, doubled=0.4, train_examples=150, steps=400), {"doubled": 0.0, "split_again": True}
    ),
    Sabotage(
        "wrong_mode", _in("mlp cnn", norm=True, dropout=0.2, eval_from=5),
        {"eval_from": None, "evaluated_in_training": False},
        _in("mlp cnn", norm=True, dropout=0.5, evaluated_in_training=True),
    ),
    Sabotage("clipping_always", _in("mlp cnn", clip=0.01, optimizer="sgd", lr=0.1), {"clip": 1.0}),
    Sabotage(
        "half_precision", _in(FEED, dtype="bfloat16", **{"*lr": 0.1}), {"dtype": "float32", "*lr": 10},
        _in(FEED, dtype="float16", optimizer="adam", lr=3e-3),
    ),
    Sabotage("batch_too_small", _all(batch=1), {"batch": 32}),
    Sabotage(
        "memorization",
        {
            "mlp": {"task": "modular_flat", "width": 128, "depth": 1, "optimizer": "adamw", "lr": 1e-2,
                    "weight_decay": 0.01, "batch": 128},
            "transformer": {"task": "modular", "width": 32, "depth": 1, "norm": False, "optimizer": "adamw", "lr": 5e-3,
                            "weight_decay": 0.01, "batch": 128},
        },
        {"weight_decay": 1.0, "steps": 1000},
    ),
    Sabotage("rank_collapse", _in("mlp cnn recurrent", constant_hidden=True), {"constant_hidden": False}),
    Sabotage(
        "oversmoothing", _in("transformer", residual=False, depth=5, hidden_scale=0.5), {"residual": True}
    ),
    Sabotage("loss_spikes", _all(spike_every=40), {"spike_every": 0}),
    Sabotage("softmax_twice", _in(FEED, softmax=True), {"softmax": False}),
    Sabotage("no_activation", _in("mlp cnn", activation="none"), {"activation": "relu"}),
    Sabotage("dropout_too_strong", _in(FEED, dropout=0.9), {"dropout": 0.1}),
    Sabotage("momentum_too_large", _in("mlp cnn", optimizer="momentum", lr=0.02, momentum=1.0), {"momentum": 0.9}),
    Sabotage(
        "targets_not_normalized", _in("recurrent", target_scale=50.0, target_shift=200.0),
        {"target_scale": 1.0, "target_shift": 0.0},
    ),
    Sabotage("constant_probe", _in(FEED, one_class_probe=True), {"one_class_probe": False}),
    Sabotage("not_a_number", _in("mlp cnn recurrent", nan_at=60), {"nan_at": None}),
]  # fmt: skip
KINDS = [sabotage.kind for sabotage in SABOTAGES]


def changed(setup: Setup, changes: Changes) -> Setup:
    plain = {name: value for name, value in changes.items() if name != "*lr"}
    made = replace(setup, **plain)
    return replace(made, lr=made.lr * changes.get("*lr", 1.0))


# Healthy runs: everything that people choose within sane bounds.
def healthy_setups(network: str, base: Setup) -> list[Setup]:
    rates = [changed(base, {"*lr": factor}) for factor in (0.5, 1.0, 2.0)]
    sizes = [
        replace(base, width=2 * base.width),
        replace(base, batch=2 * base.batch),
        replace(base, batch=base.batch // 2),
    ]
    others = {
        "mlp": [
            replace(base, optimizer="adam", lr=3e-3), replace(base, optimizer="momentum", lr=0.02),
            replace(base, optimizer="adamw", lr=2e-3, weight_decay=0.01), replace(base, activation="tanh"),
            replace(base, activation="gelu", optimizer="adam", lr=3e-3), replace(base, norm=True, dropout=0.1),
            replace(base, depth=base.depth + 1, optimizer="adam", lr=2e-3), replace(base, clip=5.0),
            replace(base, weight_decay=1e-3), replace(base, steps=500),
        ],
        "cnn": [
            replace(base, optimizer="adam", lr=3e-3), replace(base, optimizer="momentum", lr=0.02),
            replace(base, norm=True), replace(base, norm=True, dropout=0.1, optimizer="adamw", lr=3e-3),
            replace(base, activation="tanh"), replace(base, activation="gelu", optimizer="adam", lr=3e-3),
            replace(base, width=base.width // 2, optimizer="adam", lr=5e-3), replace(base, clip=5.0),
        ],
        "transformer": [
            replace(base, optimizer="adamw", weight_decay=0.05), replace(base, dropout=0.1),
            replace(base, activation="gelu"), replace(base, depth=base.depth + 1), replace(base, clip=5.0),
            replace(base, post_norm=not base.post_norm), replace(base, steps=350),
        ],
        "recurrent": [
            replace(base, network="lstm"), replace(base, network="gru"), replace(base, network="rnn", lr=2e-3),
            replace(base, optimizer="adamw", weight_decay=0.01), replace(base, clip=5.0),
            replace(base, steps=400),
        ],
    }[network]  # fmt: skip
    return rates + sizes + others
