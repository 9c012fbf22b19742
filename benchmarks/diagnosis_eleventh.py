"""The eleventh set of the diagnosis: what people try first, held out.

Tutorial networks and small networks of Hugging Face on images, program text, tables and waves, 100 to 500 steps, and
each kind of fault that the issue lists. ``right`` of each fault was committed before any of these runs was judged.
Needs transformers.
"""

import argparse
import inspect
import json
import math
import string
import textwrap
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis_faults import Data, Options, split
from diagnosis_fifth_networks import Times, dense
from diagnosis_loop import Base, by, makers
from diagnosis_networks import pictures
from diagnosis_ninth import Logits


# Data ----------------------------------------------------------------------------------------------------------------
def digits_28(seed: int, o: Options) -> Data:
    """MNIST, as rows of 784; ``units``: pixels from 0 to 1, which are the targets as well; ``one_hot`` targets."""
    x, y, x_test, y_test = pictures("mnist", False)(seed, o)
    x, x_test = x.flatten(1), x_test.flatten(1)
    if o.get("units"):
        x, x_test = ((t - t.min()) / (t.max() - t.min()) for t in (x, x_test))
        return x, x, x_test, x_test
    return (x, F.one_hot(y).float(), x_test, F.one_hot(y_test).float()) if o.get("one_hot") else (x, y, x_test, y_test)


@cache
def _sources() -> list[str]:
    return [inspect.getsource(module) for module in (argparse, json.decoder, string, textwrap)]


def program(seed: int, o: Options) -> Data:
    """Windows of 32 characters of Python's argparse; the target of each is the next character."""
    ids = torch.tensor([min(ord(c), 127) for c in _sources()[0]])
    start = torch.randint(0, len(ids) - 33, (840,), generator=torch.Generator().manual_seed(seed))
    windows = ids[start[:, None] + torch.arange(33)]
    return split(windows[:, :-1], windows[:, 1:], 40)


def lines(seed: int, o: Options) -> Data:
    """Twenty words of program text, each by a number below 300; the class is the module they come from."""
    rng, rows, classes = torch.Generator().manual_seed(seed), [], []
    for place, text in enumerate(_sources()):
        words = torch.tensor([sum(31**i * ord(c) for i, c in enumerate(word[:6])) % 300 for word in text.split()])
        start = torch.randint(0, len(words) - 20, (350,), generator=rng)
        rows.append(words[start[:, None] + torch.arange(20)])
        classes += [place] * 350
    order = torch.randperm(1400, generator=rng)
    return split(torch.cat(rows)[order], torch.tensor(classes)[order], 120)


def repeated(seed: int, o: Options) -> Data:
    """Eight symbols, a stop, and the same symbols again; the target is the next symbol."""
    x = torch.randint(1, 12, (1000, 8), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([x, torch.zeros(1000, 1, dtype=torch.long), x], 1)
    return split(ids[:, :-1], ids[:, 1:], 60)


def houses(seed: int, o: Options) -> Data:
    """Prices from eight features with long tails; ``raw``: neither features nor prices are standardised."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(1500, 8, generator=rng)
    x, w = torch.exp(0.7 * z) * 10.0 ** torch.arange(-2, 6), torch.randn(8, 1, generator=rng)
    price = torch.exp(0.5 * z @ w / w.norm() + 0.3 * torch.relu(z[:, :1]) * z[:, 1:2]) * 2e5
    price = price * torch.exp(0.1 * torch.randn(1500, 1, generator=rng))
    if not o.get("raw"):
        x, price = ((t - t.mean(0)) / t.std(0) for t in (x.log(), price))
    return split(x, price, 150)


def curve(seed: int, o: Options) -> Data:
    x = torch.rand(600, 1, generator=torch.Generator().manual_seed(seed)) * 6 - 3
    y = torch.sin(2 * x) + 0.3 * x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))
    return split(x / 1.7, y, 100)


def moons(seed: int, o: Options) -> Data:
    """Two half circles; the target is 0.0 or 1.0."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (900, 1), generator=rng)
    angle = math.pi * (torch.rand(900, 1, generator=rng) + y)
    x = torch.cat([angle.cos() + y - 0.5, angle.sin() + 0.5 * y - 0.25], 1)
    return split(1.3 * (x + 0.15 * torch.randn(x.shape, generator=rng)), y.float(), 120)


def waveforms(seed: int, o: Options) -> Data:
    """Two channels of 40 samples: a sine, square, saw tooth or chirp at a random phase and pitch, under noise."""
    rng = torch.Generator().manual_seed(seed)
    y, phase, pitch = torch.randint(0, 4, (1200,), generator=rng), *torch.rand(2, 1200, 1, generator=rng)
    at = (2 + 2 * pitch) * torch.linspace(0, 1, 40) + phase
    shapes = torch.stack([(6.3 * at).sin(), (6.3 * at).sin().sign(), 2 * (at % 1) - 1, (4 * at**2).sin()], 1)
    wave = shapes[torch.arange(1200), y]
    return split(torch.stack([wave, wave.roll(5, 1)], 1) + 0.3 * torch.randn(1200, 2, 40, generator=rng), y, 120)


def marked_sum(seed: int, o: Options) -> Data:
    """The adding problem: 16 numbers, of which two are marked; the target is their sum."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(1300, 16, 2, generator=rng)
    x[..., 1] = torch.rand(1300, 16, generator=rng).argsort(1) < 2
    return split(x, x.prod(-1).sum(1, keepdim=True), 120)


def currents(seed: int, o: Options) -> Data:
    """A damped oscillation from a random start, measured with noise; the target of each step is the value ahead."""
    rng = torch.Generator().manual_seed(seed)
    rate, size, phase = torch.rand(3, 600, 1, generator=rng)
    t = torch.arange(31.0)
    values = (1 + size) * torch.exp(-0.05 * t) * torch.cos((0.3 + 0.6 * rate) * t + 6.3 * phase)
    values = values + 0.05 * torch.randn(values.shape, generator=rng)
    return split(values[:, :-1, None], values[:, 1:, None], 80)


def ratings(seed: int, o: Options) -> Data:
    """Pairs of one of 40 users and one of 30 films; the target is a rating that hidden tastes make."""
    rng = torch.Generator().manual_seed(seed)
    tastes, films = torch.randn(40, 3, generator=rng), torch.randn(30, 3, generator=rng)
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(30))[torch.randperm(1200, generator=rng)]
    score = (tastes[pairs[:, 0]] * films[pairs[:, 1]]).sum(1, keepdim=True) / 3**0.5
    return split(pairs, score + 0.2 * torch.randn(score.shape, generator=rng), 150)


# Networks ------------------------------------------------------------------------------------------------------------
def lenet(o: Options) -> nn.Module:
    """The network of many first lessons; ``end``: what comes after the last layer."""
    act = o.get("act", nn.ReLU)
    return nn.Sequential(nn.Conv2d(1, 6, 5), act(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), act(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Linear(256, 60), act(), nn.Linear(60, 30), act(), nn.Linear(30, 10),
                         *([o["end"]] if "end" in o else []))  # fmt: skip


def vgg(o: Options) -> nn.Module:
    layers, a = list[nn.Module](), 1
    for b in (8, 16, 24):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        a = b
    drop = nn.Dropout(o.get("dropout", 0.3))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(216, 40), nn.ReLU(), drop, nn.Linear(40, 10))


def deep(o: Options) -> nn.Module:
    """Many layers of 40 units on rows of 784, all weights of one deviation where ``spread`` is given."""
    sizes, layers = [784, *[40] * o.get("depth", 8)], list[nn.Module]()
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), o.get("act", nn.ReLU)()]
        nn.init.kaiming_normal_(layers[-2].weight)  # type: ignore[arg-type]
        if "spread" in o:
            nn.init.normal_(layers[-2].weight, std=o["spread"])  # type: ignore[arg-type]
    return nn.Sequential(*layers, nn.Linear(40, 10))


class Letters(nn.Module):
    """A recurrent language model of characters."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(128, 24), o.get("cell", nn.GRU)(24, 64, batch_first=True)
        self.drop, self.head = nn.Dropout(o.get("dropout", 0.0)), nn.Linear(64, 128)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.cell(self.table(ids))[0]))


class Series(nn.Module):
    """A recurrent layer over numbers with a readout at every step, or after the last."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.cell = o.get("cell", nn.LSTM)(o["numbers"], 32, batch_first=True)
        self.head, self.last = nn.Linear(32, 1), bool(o.get("last"))

    def forward(self, x: Tensor) -> Tensor:
        states = self.cell(x)[0]
        return self.head(states[:, -1] if self.last else states)


class Bag(nn.Module):
    """The mean of the words' vectors."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(300, 24), nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


class Factors(nn.Module):
    """A vector and a number for each user and film; the rating is the vectors' product and the numbers' sum."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(40, 8), nn.Embedding(30, 8)
        self.of_user, self.of_film = nn.Embedding(40, 1), nn.Embedding(30, 1)
        for table in (self.users, self.films, self.of_user, self.of_film):
            nn.init.normal_(table.weight, std=o.get("spread", 0.3))

    def forward(self, pairs: Tensor) -> Tensor:
        u, f = pairs.unbind(1)
        return (self.users(u) * self.films(f)).sum(1, keepdim=True) + self.of_user(u) + self.of_film(f)


class Adder(nn.Module):
    """torch's own encoder layers over numbers, and the mean of its tokens."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, o.get("dropout", 0.0), batch_first=True)
        self.up, self.body = nn.Linear(2, 32), nn.TransformerEncoder(layer, o.get("depth", 2))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.up(x)).mean(1))


def sound_network(o: Options) -> nn.Module:
    layers, a = list[nn.Module](), 2
    for b in (16, 24):
        layers += [nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(2)]
        a = b
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 4))


def llama(o: Options) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=12, hidden_size=32, intermediate_size=64, num_hidden_layers=o.get("depth", 2),
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
                         pad_token_id=None, initializer_range=o.get("spread", 0.05))  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def distilbert(o: Options) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    drop = o.get("dropout", 0.1)
    config = DistilBertConfig(vocab_size=300, max_position_embeddings=24, n_layers=2, n_heads=4, dim=32, hidden_dim=64,
                              num_labels=4, dropout=drop, attention_dropout=drop, seq_classif_dropout=drop,
                              initializer_range=0.05)  # fmt: skip
    return Logits(DistilBertForSequenceClassification(config))


def convnext(o: Options) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_channels=1, patch_size=4, hidden_sizes=[12, 16, 24, 32], depths=[1, 1, 2, 1],
                            num_labels=10, image_size=32)  # fmt: skip
    return nn.Sequential(nn.ZeroPad2d(2), Logits(ConvNextForImageClassification(config)))


# Runs ----------------------------------------------------------------------------------------------------------------
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
LOG, PROBABILITY = {"end": nn.LogSoftmax(-1), "objective": F.nll_loss}, {"objective": F.binary_cross_entropy}
fashion = pictures("fashion-mnist", False)
BASES = {
    "lenet": Base(fashion, lenet, by(SGD, lr=0.03, momentum=0.9), {"steps": 300, "batch": 32}),
    "vgg": Base(fashion, vgg, by(Adam, lr=2e-3), {"steps": 150, "batch": 48}),
    "deep": Base(digits_28, deep, by(Adam, lr=1e-3), {"steps": 250}),
    "tanh": Base(digits_28, dense(784, 64, 32, 10, act=nn.Tanh), by(SGD, lr=0.1), {"steps": 300, "batch": 32}),
    "squared": Base(digits_28, dense(784, 64, 64, 10, act=nn.ReLU), by(Adam, lr=1e-3),
                    {"steps": 250, "one_hot": True, "objective": F.mse_loss}),
    "coder": Base(digits_28, dense(784, 64, 16, 64, 784, act=nn.ReLU), by(Adam, lr=3e-3),
                  {"steps": 200, "units": True, "end": nn.Sigmoid(), **PROBABILITY}),
    "letters": Base(program, Letters, by(AdamW, lr=5e-3), {"steps": 300, "batch": 32, "clip": 1.0}),
    "currents": Base(currents, Series, by(Adam, lr=5e-3), {"steps": 200, "batch": 32, "numbers": 1}),
    "adding": Base(marked_sum, Series, by(Adam, lr=1e-2), {"steps": 400, "numbers": 2, "last": True}),
    "bag": Base(lines, Bag, by(Adam, lr=5e-3), {"steps": 300, "batch": 32}),
    "ratings": Base(ratings, Factors, by(Adam, lr=1e-2), {"steps": 300}),
    "houses": Base(houses, dense(8, 64, 64, 1, act=nn.ReLU), by(Adam, lr=2e-3), {"steps": 300, "batch": 32}),
    "curve": Base(curve, dense(1, 40, 40, 1, act=nn.Tanh), by(Adam, lr=5e-3), {"steps": 500, "batch": 100}),
    "moons": Base(moons, dense(2, 24, 24, 1, act=nn.ReLU), by(Adam, lr=5e-3),
                  {"steps": 200, "batch": 32, "end": nn.Sigmoid(), **PROBABILITY}),
    "waves": Base(waveforms, sound_network, by(SGD, lr=0.05, momentum=0.9), {"steps": 200, "batch": 32}),
    "adder": Base(marked_sum, Adder, by(AdamW, lr=1e-3), {"steps": 300}),
    "llama": Base(repeated, llama, by(AdamW, lr=3e-3), {"steps": 250, "batch": 32}),
    "distilbert": Base(lines, distilbert, by(AdamW, lr=2e-3), {"steps": 200, "batch": 32}),
    "convnext": Base(fashion, convnext, by(AdamW, lr=4e-3), {"steps": 150, "batch": 48}),
}  # fmt: skip
broken, sound = makers(BASES)
WRONG, SHY = "labels memorization", "vanishing_signals rank_collapse"
FAULTS = [
    broken("lenet", "SGD with momentum at 1", "lr_too_large", by(SGD, lr=1.0, momentum=0.9)),
    broken("lenet", "SGD at 1e-5", "lr_too_small", by(SGD, lr=1e-5)),
    broken("lenet", "pixels from 0 to 255, Adam", "inputs_not_normalized", by(Adam, lr=1e-3), pixels=255.0),
    broken("lenet", "softmax as the last layer", "softmax_twice", end=nn.Softmax(-1)),
    broken("lenet", "no training example of class 6", "class_missing", without=6),
    broken("lenet", "examples sorted by class", "classes_in_order", sorted=True),
    broken("lenet", "40 % of the training labels shuffled", "labels", shuffle=0.4),
    broken("vgg", "in evaluation mode after 30 steps", "wrong_mode", evaluation=30),
    broken("vgg", "evaluated in training mode", "wrong_mode", evaluated_in_training=True, logs=True, dropout=0.5),
    broken("vgg", "SGD, gradients clipped to 0.01", "clipping_always", by(SGD, lr=0.05), clip=0.01),
    broken("deep", "twelve layers of deviation 0.02", SHY, depth=12, spread=0.02),
    broken("deep", "twelve layers of deviation 1", "exploding_signals", depth=12, spread=1.0),
    broken("deep", "eight layers of sigmoids", SHY, act=nn.Sigmoid),
    broken("deep", "biases of -4", "dead_units", bias=-4.0),
    broken("deep", "SGD at 1: units die", "lr_too_large dead_units", by(SGD, lr=1.0)),
    broken("tanh", "weights of deviation 1", "saturated_units", scale=30.0),
    broken("tanh", "outputs times 200, SGD at 2e-6", "lazy", by(SGD, lr=2e-6), end=Times(200.0)),
    broken("tanh", "half of the probe twice", "doubled_examples", copies=2),
    broken("tanh", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("squared", "weight decay 1", "weight_decay_too_strong", by(SGD, lr=0.05, momentum=0.9, weight_decay=1.0)),
    broken("squared", "all weights equal", "rank_collapse", constant=True),
    broken("letters", "AdamW at 0.3, no clipping", "lr_too_large", by(AdamW, lr=0.3), clip=1e9),
    broken("letters", "all training targets shuffled", WRONG, shuffle=1.0),
    broken("letters", "the embedding not in the optimiser", "not_in_optimizer", left="table"),
    broken("currents", "no zero_grad, SGD", "gradients_not_zeroed", by(SGD, lr=0.02), keep=True),
    broken("currents", "every 25th batch 100 times too large", "loss_spikes", spikes=25),
    broken("bag", "24 training examples", "memorization", train_examples=24, batch=24),
    broken("bag", "batches of one, SGD", "batch_too_small", by(SGD, lr=0.1), batch=1),
    broken("houses", "raw prices", "targets_not_normalized inputs_not_normalized", raw=True),
    broken("houses", "NaN in one example", "not_a_number", nan=True),
    broken("houses", "no activation", "no_activation", linear=True),
    broken("curve", "all training targets shuffled", WRONG, shuffle=1.0),
    broken("waves", "a probe of one class", "constant_probe", one=True),
    broken("adder", "momentum 0.999", "momentum_too_large", by(SGD, lr=0.01, momentum=0.999)),
    broken("adder", "weights in float16, Adam", "half_precision", by(Adam, lr=1e-3), dtype=torch.float16),
    broken("llama", "no warm-up, AdamW at 0.3", "lr_too_large", by(AdamW, lr=0.3)),
    broken("llama", "the embedding frozen", "frozen_layer", frozen="net.model.embed_tokens"),
    broken("llama", "weights of deviation 1", "exploding_signals saturated_units", spread=1.0),
    broken("distilbert", "dropout 0.9", "dropout_too_strong", dropout=0.9),
    broken("distilbert", "a body 10,000 times slower than the head", "head_only", body=1e-4, slow="net.distilbert"),
    broken("distilbert", "AdamW at 3e-7", "lr_too_small", by(AdamW, lr=3e-7)),
    broken("convnext", "weight decay 30", "weight_decay_too_strong", by(AdamW, lr=4e-3, weight_decay=30.0)),
]  # fmt: skip

HEALTHY = [
    sound("lenet"), sound("lenet", "log-softmax and nll_loss", **LOG),
    sound("lenet", "tanh, Adam, 100 steps", by(Adam, lr=3e-3), act=nn.Tanh, steps=100),
    sound("vgg"), sound("vgg", "SGD, cosine", by(SGD, lr=0.1, momentum=0.9), cosine=True),
    sound("deep"), sound("deep", "SGD", by(SGD, lr=0.02, momentum=0.9)),
    sound("deep", "GELU, AdamW", by(AdamW, lr=2e-3, weight_decay=0.1), act=nn.GELU),
    sound("tanh"), sound("tanh", "500 steps, weight decay 1e-4", by(SGD, lr=0.2, weight_decay=1e-4), steps=500),
    sound("squared"), sound("squared", "SGD", by(SGD, lr=0.1, momentum=0.9)),
    sound("coder"), sound("coder", "squared error", by(Adam, lr=2e-3), objective=F.mse_loss),
    sound("letters"), sound("letters", "LSTM, dropout 0.2", cell=nn.LSTM, dropout=0.2),
    sound("letters", "SGD, clipped to 1", by(SGD, lr=1.0, momentum=0.9)),
    sound("currents"), sound("currents", "GRU, SGD", by(SGD, lr=0.1, momentum=0.9), cell=nn.GRU),
    sound("currents", "tanh network, clipped to 1", by(Adam, lr=2e-3), cell=nn.RNN, clip=1.0),
    sound("adding"), sound("adding", "GRU", cell=nn.GRU),
    sound("bag"), sound("bag", "batches of 8, AdamW", by(AdamW, lr=3e-3), batch=8),
    sound("ratings"), sound("ratings", "SGD, batches of 128", by(SGD, lr=0.5, momentum=0.9), batch=128),
    sound("houses"), sound("houses", "Huber loss", objective=F.smooth_l1_loss),
    sound("houses", "batch norm, SGD", by(SGD, lr=0.02, momentum=0.9), norm=True),
    sound("curve"), sound("curve", "SGD", by(SGD, lr=0.1, momentum=0.9)),
    sound("moons"), sound("moons", "squared error of a sigmoid", by(Adam, lr=1e-2), objective=F.mse_loss),
    sound("waves"), sound("waves", "Adam, one cycle", by(Adam, lr=5e-3), cosine=True),
    sound("adder"), sound("adder", "warm-up, dropout 0.1", by(AdamW, lr=2e-3), warmup=50, dropout=0.1),
    sound("llama"), sound("llama", "cosine, clipped to 1", by(AdamW, lr=5e-3, weight_decay=0.1), cosine=True, clip=1.0),
    sound("distilbert"), sound("distilbert", "goes on from a trained network", by(AdamW, lr=2e-4), pretrained=150),
    sound("convnext"), sound("convnext", "momentum", by(SGD, lr=0.1, momentum=0.9)),
]  # fmt: skip
