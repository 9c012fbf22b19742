"""Held-out sets without end: networks of the other sets, settings and faults drawn at random.

A number that was not drawn before is a set that nobody has seen. Drawn optimisers need not suit the network: a healthy
run counts only if it has learnt (the probe's loss has fallen by a fifth). Faults are made with the network's own. Draws
6, 7 and 8 were made of the networks of the fourth and the fifth set, draw 99 also of those of a trial, which is gone,
and of the ninth.
"""

import random
from dataclasses import dataclass

import torch

import diagnosis_eleventh
import diagnosis_fifth
import diagnosis_fourth
import diagnosis_ninth
from diagnosis_faults import Options
from diagnosis_loop import Base, Lion, Make, Run, by

HEALTHY_RUNS, FAULTY_RUNS = 100, 96
LABELS = {"resnet", "depthwise", "reader", "listener", "words", "tagger", "adapted", "experts", "mlp", "wine", "graph",
          "bigru", "vit", "space", "nodes", "segmenter", "lenet", "vgg", "deep", "tanh", "letters", "bag",
          "waves"}  # fmt: skip
TOKENS = {"reader", "words", "tagger", "letters", "bag", "ratings"}
POSITIONS = {"reader", "tagger", "nodes", "segmenter", "letters"}
HEADS = {"resnet", "reader", "listener", "words", "tagger", "variational", "graph", "bigru", "vit", "space", "nodes",
         "denoiser", "letters", "currents", "adding", "bag", "adder"}  # fmt: skip
RELUS = {"tags", "views", "teacher", "mlp", "depthwise", "unet", "graph", "flow", "deep", "houses", "lenet"}
MODES = {"resnet", "words", "vgg"}
DROPOUT = {"friedman", "gaussian", "tags", "mlp", "reader", "vit", "wine", "diabetes", "cancer", "segmenter", "vgg",
           "letters", "adder"}  # fmt: skip
FIRST = {"resnet": "stem", "reader": "words", "listener": "cell", "words": "conv", "tagger": "cell", "mlp": "0.",
         "friedman": "0.", "depthwise": "0.", "auto": "0.", "graph": "first", "unet": "first", "vit": "patch",
         "bigru": "cell", "wine": "0.", "diabetes": "0.", "cancer": "0.", "nodes": "first", "denoiser": "first",
         "space": "first", "segmenter": "0.", "lenet": "0.", "vgg": "0.", "deep": "0.", "tanh": "0.", "houses": "0.",
         "curve": "0.", "waves": "0.", "letters": "table", "bag": "table", "currents": "cell", "adding": "cell",
         "adder": "up"}  # fmt: skip
HUGGING_FACE = {*diagnosis_ninth.HUGGING_FACE, "llama", "distilbert", "convnext"} - {"vit"}  # slower than the others
SETS = (diagnosis_ninth, diagnosis_eleventh, diagnosis_fifth, diagnosis_fourth)  # of the same name the last
BASES = {name: base for one in SETS for name, base in one.BASES.items() if name not in HUGGING_FACE}
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, Make] = {
    "Adam": by(Adam, lr=3e-3),
    "AdamW": by(AdamW, lr=2e-3, weight_decay=0.05),
    "momentum": by(SGD, lr=0.05, momentum=0.9),
    "Nesterov": by(SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Lion": by(Lion, lr=1e-3, weight_decay=0.01),
    "RMSprop": by(torch.optim.RMSprop, lr=1e-3),
    "NAdam": by(torch.optim.NAdam, lr=3e-3),
    "Adagrad": by(torch.optim.Adagrad, lr=0.03),
}


@dataclass(frozen=True)
class Fault:
    """``where``: the networks it can be made in; ``right``: kinds that name it."""

    name: str
    right: str
    where: set[str]
    o: Options
    optimizer: Make | None = None


ALL = set(BASES) - {"game", "views", "adapted"}
OWN = {name for name, base in BASES.items() if base.loss is not None or "objective" in base.o}
FAULTS = [
    Fault("Adam at 1e-7", "lr_too_small", ALL, {}, by(Adam, lr=1e-7)),
    Fault("Adam at 3", "lr_too_large", ALL, {}, by(Adam, lr=3.0)),
    Fault("SGD at 1e-7", "lr_too_small", ALL, {}, by(SGD, lr=1e-7)),
    Fault("no zero_grad", "gradients_not_zeroed", ALL, {"keep": True}),
    Fault("first layer frozen", "frozen_layer", set(FIRST), {"frozen": True}),
    Fault("first layer not in the optimiser", "not_in_optimizer", set(FIRST), {"left": True}),
    Fault("a body 100,000 times slower", "head_only", HEADS - {"adapted"}, {"body": 1e-5}),
    Fault("training labels shuffled", "labels memorization", LABELS - {"reader"}, {"shuffle": 1.0}),
    Fault("batches of one", "batch_too_small", LABELS - POSITIONS - {"resnet"}, {"batch": 1}),
    Fault("gradients clipped to 1e-4", "clipping_always", ALL, {"clip": 1e-4}, by(SGD, lr=0.05, momentum=0.9)),
    Fault("weight decay 100", "weight_decay_too_strong", ALL, {}, by(AdamW, lr=5e-3, weight_decay=100.0)),
    Fault("momentum 0.999", "momentum_too_large", ALL, {}, by(SGD, lr=0.02, momentum=0.999)),
    Fault("dropout 0.9", "dropout_too_strong", DROPOUT, {"dropout": 0.9}),
    Fault("inputs of size 300", "inputs_not_normalized",
          {"friedman", "mlp", "resnet", "depthwise", "tags", "listener", "space", "lenet", "deep", "houses"},
          {"pixels": 500.0}),
    Fault("targets of 1,000 y + 5,000", "targets_not_normalized",
          {"friedman", "auto", "causal", "diabetes", "routed", "houses", "curve", "currents"},
          {"targets": (1000.0, 5000.0)}),
    Fault("examples sorted by class", "classes_in_order", LABELS - TOKENS - POSITIONS, {"sorted": True}),
    Fault("no training example of class 1", "class_missing",
          {"resnet", "mlp", "experts", "depthwise", "vit", "wine", "space", "lenet", "tanh"}, {"without": 1}),
    Fault("biases of -8", "dead_units", RELUS, {"bias": -8.0}),
    Fault("softmax before cross-entropy", "softmax_twice", LABELS, {"twice": True}),
    Fault("in evaluation mode", "wrong_mode", MODES, {"evaluation": 0}),
    Fault("24 training examples", "memorization", LABELS - POSITIONS | {"friedman", "diabetes", "houses", "curve"},
          {"train_examples": 24}),
    Fault("weights in bfloat16, SGD at 1e-3", "half_precision", ALL - TOKENS - OWN - {"variational"},
          {"dtype": torch.bfloat16}, by(SGD, lr=1e-3)),
    Fault("equal weights in every unit", "rank_collapse",
          {"friedman", "mlp", "auto", "tags", "wine", "houses", "routed", "tanh"}, {"constant": True}),
    Fault("a third of the probe twice", "doubled_examples", ALL, {"copies": 3}),
]  # fmt: skip


def settings(rng: random.Random, base: Base, name: str) -> tuple[str, Options]:
    """An optimiser and two options, and how they are called."""
    chosen = rng.choice(["its own", "its own", *OPTIMIZERS])
    o: Options = {"steps": rng.choice([150, 240, 350])}
    may: list[Options] = [{"clip": 1.0}, {"cosine": True}, {"accumulate": 2}, {"batch": base.o.get("batch", 64) // 2}]
    may += [{"smoothing": 0.1}] if name in LABELS else []
    may += [{"noise": 0.2}] if name not in TOKENS | {"graph", "nodes"} else []
    may += [{"dropout": 0.2}] if name in DROPOUT else []
    for option in rng.sample(may, rng.choice([0, 1, 2])):
        o |= option
    words = ", ".join(f"{k} {v}" for k, v in o.items())
    return f"{chosen}, {words}", o | ({"optimizer": OPTIMIZERS[chosen]} if chosen in OPTIMIZERS else {})


def draw(number: int) -> list[Run]:
    rng = random.Random(number)
    faults, healthy = list[Run](), list[Run]()
    while len(healthy) < HEALTHY_RUNS:
        name = rng.choice(sorted(BASES))
        words, o = settings(rng, BASES[name], name)
        healthy.append(Run(BASES[name], f"{name}: {words}", (), o, healthy=True, must_learn=True))
    for place in range(FAULTY_RUNS):
        fault = FAULTS[place % len(FAULTS)]
        name = rng.choice(sorted(fault.where))
        words, o = settings(rng, BASES[name], name)
        o = {k: v for k, v in o.items() if k != "optimizer"}
        o |= {k: FIRST[name] if v is True and k in ("frozen", "left") else v for k, v in fault.o.items()}
        o |= {"optimizer": fault.optimizer} if fault.optimizer else {}
        named = f"{name}: {fault.name} ({words.partition(', ')[2]})"
        faults.append(Run(BASES[name], named, tuple(fault.right.split()), o))
    return faults + healthy
