"""The kinds of faults of benchmarks/diagnosis.py in four networks, with what the first remedy of each changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import diagnosis_networks as of
from diagnosis_faults import Options
from diagnosis_loop import Base, Make, Run, by

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
NETWORKS = ("mlp", "cnn", "transformer", "recurrent")
LOGS: Options = {"logs": True}
BASES: dict[str, dict[str, Base]] = {
    "calibration": {
        "mlp": Base(of.flat_digits, of.dense, by(SGD, lr=0.1), {"sizes": (64, 10), "width": 32, "steps": 250}),
        "cnn": Base(of.digit_images, of.convolutional, by(SGD, lr=0.1), {"sizes": (1, 10), "width": 8, "steps": 200}),
        "transformer": Base(of.tokens(of.majority), of.Encoder, by(Adam, lr=3e-3),
                            {"sizes": (6, 10, 6), "width": 24, "norm": True, "steps": 200}),
        "recurrent": Base(of.memory, of.Recurrent, by(Adam, lr=5e-3),
                          {"sizes": (3, 3), "cell": "gru", "width": 24, "batch": 32, "steps": 250}),
    },
    "third": {
        "mlp": Base(of.pictures("fashion-mnist", True), of.dense, by(Adam, lr=2e-3),
                    {"sizes": (196, 10), "width": 64, "depth": 3, "batch": 48, "steps": 220}),
        "cnn": Base(of.pictures("fashion-mnist", False), of.strided, by(Adam, lr=5e-3),
                    {"sizes": (1, 10), "width": 12, "depth": 3, "steps": 200}),
        "transformer": Base(of.tokens(of.marked), of.Encoder, by(Adam, lr=4e-3),
                            {"sizes": (12, 9, 6), "width": 20, "norm": True, "causal": True, "steps": 220}),
        "recurrent": Base(of.switches, of.Recurrent, by(Adam, lr=5e-3),
                          {"sizes": (2, 2), "cell": "gru2", "width": 24, "batch": 32, "steps": 250}),
    },
    "tenth": {
        "mlp": Base(of.pictures("mnist", True), of.dense, by(AdamW, lr=1.5e-3),
                    {"sizes": (196, 10), "width": 40, "depth": 4, "batch": 56, "steps": 230}),
        "cnn": Base(of.pictures("mnist", False), of.pooled, by(SGD, lr=0.05, momentum=0.9),
                    {"sizes": (1, 10), "width": 10, "depth": 3, "batch": 40, "steps": 180}),
        "transformer": Base(of.tokens(of.counted), of.Encoder, by(AdamW, lr=3e-3),
                            {"sizes": (5, 12, 5), "width": 28, "depth": 3, "norm": True, "act": nn.GELU,
                             "steps": 210}),
        "recurrent": Base(of.integrals, of.Recurrent, by(Adam, lr=8e-3),
                          {"sizes": (2, 2), "cell": "lstm", "width": 28, "batch": 24, "steps": 240}),
    },
}  # fmt: skip
MOMENTUM_RATE = 0.02


@dataclass(frozen=True)
class Sabotage:
    """``where``: options by network. ``remedy``: what the first advice changes then. ``odd``: others for odd seeds."""

    kind: str
    where: Mapping[str, Options]
    remedy: Options
    odd: Mapping[str, Options] | None = None


def _all(**o: Any) -> dict[str, Options]:
    return dict.fromkeys(NETWORKS, o)


def _in(networks: str, **o: Any) -> dict[str, Options]:
    return dict.fromkeys(networks.split(), o)


FEED = "mlp cnn transformer"
SABOTAGES = [
    Sabotage("lr_too_small", _all(lr=1 / 300), {"lr": 1 / 3}),
    Sabotage("lr_too_large", _in("mlp cnn", lr=60) | _in("transformer recurrent", lr=150), {"lr": 6},
             _in("mlp cnn", lr=200) | _in("transformer recurrent", lr=50)),
    Sabotage("exploding_signals",
             _in("mlp cnn", depth=7, hidden_scale=6.0) | _in("transformer", norm=False, hidden_scale=6.0, depth=3),
             {"hidden_scale": 1.6}),
    Sabotage("vanishing_signals", _in("mlp cnn", depth=8, hidden_scale=0.4), {"norm": True},
             _in("mlp cnn", depth=8, act=nn.Sigmoid)),
    Sabotage("dead_units", _in(FEED, act=nn.ReLU, hidden_bias=-6.0), {"hidden_bias": 0.0}),
    Sabotage("saturated_units", _in("mlp cnn", act=nn.Tanh, hidden_scale=30.0) | _in("recurrent", hidden_scale=15.0),
             {"hidden_scale": 1.0}),
    Sabotage("frozen_layer", _all(frozen="largest"), {"frozen": ""}),
    Sabotage("not_in_optimizer", _all(left="largest"), {"left": ""}),
    Sabotage("gradients_not_zeroed", _all(keep=True), {"keep": False}),
    Sabotage("lazy", _in("mlp cnn", output_scale=100.0, optimizer=by(SGD, lr=3e-5)),
             {"output_scale": 0.0, "optimizer": by(SGD, lr=0.1)}),
    Sabotage("head_only", _all(body=1e-4), {"body": 1.0}),
    Sabotage("weight_decay_too_strong",
             _in("mlp cnn", weight_decay=0.5)
             | _in("transformer recurrent", weight_decay=30.0, optimizer=by(AdamW, lr=3e-3)),
             {"weight_decay": 0.0},
             _in("mlp cnn", weight_decay=0.3)
             | _in("transformer recurrent", weight_decay=0.3, optimizer=by(Adam, lr=3e-3))),
    Sabotage("labels", _all(shuffle=1.0, probe_too=True), {"shuffle": 0.0},
             _in(FEED, shuffle=0.6) | _in("recurrent", shuffle=1.0)),
    Sabotage("class_missing", _in(FEED, without=3), {"without": None}),
    Sabotage("classes_in_order", _in(FEED, sorted=True), {"sorted": False}),
    Sabotage("inputs_not_normalized", _in("mlp cnn recurrent", inputs=(50.0, 100.0)), {"inputs": (1.0, 0.0)}),
    Sabotage("doubled_examples",  # copies mislead where examples are memorised: few of them, and many steps
             _in(FEED, doubled=0.4, train_examples=150, steps=400), {"doubled": 0.0}),
    Sabotage("wrong_mode", _in("mlp cnn", norm=True, dropout=0.2, depth=6, evaluation=0),
             {"evaluation": None, "evaluated_in_training": False},
             _in("mlp cnn", norm=True, dropout=0.5, evaluated_in_training=True)),
    Sabotage("clipping_always", _in("mlp cnn", clip=0.01, optimizer=by(SGD, lr=0.1)), {"clip": 1.0}),
    Sabotage("half_precision", _in(FEED, dtype=torch.bfloat16, lr=0.1), {"dtype": torch.float32, "lr": 1.0},
             _in(FEED, dtype=torch.float16, optimizer=by(Adam, lr=3e-3))),
    Sabotage("batch_too_small", _all(batch=1), {"batch": 32}),
    Sabotage(
        "memorization",
        {"mlp": {"data": of.sums(True), "sizes": (46, 23), "width": 128, "depth": 1, "batch": 128,
                 "optimizer": by(AdamW, lr=1e-2, weight_decay=0.01)},
         "transformer": {"data": of.sums(False), "sizes": (24, 3, 23), "width": 32, "depth": 1, "norm": False,
                         "batch": 128, "optimizer": by(AdamW, lr=5e-3, weight_decay=0.01)}},
        {"weight_decay": 1.0, "steps": 1000},
    ),
    Sabotage("rank_collapse", _in("mlp cnn recurrent", hidden_constant=True), {"hidden_constant": False}),
    Sabotage("oversmoothing", _in("transformer", residual=False, depth=5, hidden_scale=0.5), {"residual": True}),
    Sabotage("loss_spikes", _all(bad_every=40), {"bad_every": 0}),
    Sabotage("softmax_twice", _in(FEED, twice=True), {"twice": False}),
    Sabotage("no_activation",  # on a task that one layer cannot learn: elsewhere it costs nothing
             _in("mlp cnn", act=nn.Identity, negatives=True), {"act": nn.ReLU}),
    Sabotage("dropout_too_strong", _in(FEED, dropout=0.9), {"dropout": 0.1}),
    Sabotage("momentum_too_large", _in("mlp cnn", optimizer=by(SGD, lr=MOMENTUM_RATE, momentum=1.0)),
             {"optimizer": by(SGD, lr=MOMENTUM_RATE, momentum=0.9)}),
    Sabotage("targets_not_normalized", _in("recurrent", targets=(50.0, 200.0)), {"targets": (1.0, 0.0)}),
    Sabotage("constant_probe", _in(FEED, held_out_first=True, fresh=400), {"held_out_first": False}),
    Sabotage("not_a_number", _in("mlp cnn recurrent", nan_at=60), {"nan_at": None}),
]  # fmt: skip


def broken_runs(part: str, seed: int) -> list[Run]:
    found = []
    for sabotage in SABOTAGES:
        for network, o in (sabotage.odd if sabotage.odd and seed % 2 else sabotage.where).items():
            base = BASES[part][network]
            logs = LOGS if o.get("norm", base.o.get("norm")) or o.get("dropout") else {}
            found.append(Run(base, network, (sabotage.kind,), _for_labels(network, logs) | o, remedy=sabotage.remedy))
    return found


def _for_labels(network: str, logs: Options) -> Options:
    return {} if network == "recurrent" else logs


# Healthy runs: everything that people choose within sane bounds.
def healthy_runs(part: str) -> list[Run]:
    return [Run(BASES[part][network], network, (), _for_labels(network, LOGS) | o, healthy=True)
            for network in NETWORKS for o in _sane(network, BASES[part][network].o)]  # fmt: skip


def _sane(network: str, base: Options) -> list[Options]:
    batch, width, depth = base.get("batch", 64), base["width"], base.get("depth", 2)
    usual: list[Options] = [{"lr": 0.5}, {}, {"lr": 2.0}, {"width": 2 * width}, {"batch": 2 * batch},
                            {"batch": batch // 2}, {"clip": 5.0}]  # fmt: skip
    adam, momentum = _of(Adam, lr=3e-3), _of(SGD, lr=0.02, momentum=0.9)
    others: dict[str, list[Options]] = {
        "mlp": [adam, momentum, _of(AdamW, lr=2e-3, weight_decay=0.01), {"act": nn.Tanh}, adam | {"act": nn.GELU},
                {"norm": True, "dropout": 0.1}, _of(Adam, lr=2e-3) | {"depth": depth + 1}, {"weight_decay": 1e-3},
                {"steps": 500}],
        "cnn": [adam, momentum, {"norm": True}, _of(AdamW, lr=3e-3) | {"norm": True, "dropout": 0.1},
                {"act": nn.Tanh}, adam | {"act": nn.GELU}, _of(Adam, lr=5e-3) | {"width": width // 2}],
        "transformer": [_of(AdamW, lr=3e-3, weight_decay=0.05), {"dropout": 0.1}, {"act": nn.GELU},
                        {"depth": depth + 1}, {"post_norm": True}, {"steps": 350}],
        "recurrent": [{"cell": "lstm"}, {"cell": "gru"}, _of(Adam, lr=2e-3) | {"cell": "rnn"},
                      _of(AdamW, lr=5e-3, weight_decay=0.01),
                      {"steps": 400}],
    }  # fmt: skip
    return usual + others[network]


def _of(kind: Any, **settings: Any) -> Options:
    made: Make = by(kind, **settings)
    return {"optimizer": made}
