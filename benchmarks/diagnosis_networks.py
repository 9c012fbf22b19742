"""Small networks and tasks for the sabotaged and healthy runs of benchmarks/diagnosis.py."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.tasks import Task, digits, flip_flop, memory_pro, mnist, modular


@dataclass(frozen=True)
class Data:
    """Examples for training and others that are held out; ``classes`` is 0 for numbers.

    ``fresh``: more examples, where the sabotage lies in how the data were split.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    fresh: tuple[Tensor, Tensor] | None = None


ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid, "none": nn.Identity}


def data_for(task: str, seed: int) -> Data:
    if task == "digits":
        found = digits(seed=seed)
        return Data(found.x, found.y, found.x_test[:160], found.y_test[:160], 10)
    if task == "images":
        found = digits(seed=seed)
        x, x_test = found.x.reshape(-1, 1, 8, 8), found.x_test[:128].reshape(-1, 1, 8, 8)
        return Data(x, found.y, x_test, found.y_test[:128], 10)
    if task in ("fashion", "fashion_images"):
        return _fashion(seed, flat=task == "fashion")
    if task in TOKENS:
        make, classes = TOKENS[task]
        x, y = make(1500, seed)
        return Data(x[:1400], y[:1400], x[1400:], y[1400:], classes)
    if task in ("modular", "modular_flat"):
        p = 23
        found = modular(p, seed=seed, train=0.6)
        x, x_test = found.x, found.x_test
        if task == "modular_flat":
            x, x_test = (nn.functional.one_hot(t[:, :2], p).flatten(1).float() * math.sqrt(p) / 2 for t in (x, x_test))
        return Data(x, found.y, x_test[:96], found.y_test[:96], p)
    if task in ("memory", "flip_flop"):
        times = {"fixation": 3, "stimulus": 4, "delay": 5, "response": 4}
        train, test = (
            memory_pro(n, seed=s, noise=0.1, **times)
            if task == "memory"
            else flip_flop(n, seed=s, steps=16, bits=2, rate=0.2)
            for n, s in ((512, seed), (64, seed + 99))
        )
        order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        return Data(train.x[order], train.y[order], test.x, test.y, 0)
    raise ValueError(task)


@cache
def _fashion_files() -> Task:
    """Some thousands of Fashion-MNIST's images, read once in a process."""
    found = mnist("fashion-mnist", train=6000, test=2000)
    return Task(found.x.clone(), found.y.clone(), found.x_test.clone(), found.y_test.clone())


def _fashion(seed: int, flat: bool) -> Data:
    """1,400 images of 28 x 28 pixels; ``flat``: means of 2 x 2 pixels, as rows of 196."""
    found, rng = _fashion_files(), torch.Generator().manual_seed(seed)
    train, test = (
        torch.randperm(6000, generator=rng)[:1400],
        torch.randperm(2000, generator=rng)[: 160 if flat else 128],
    )
    x, x_test = (t.reshape(-1, 1, 28, 28) for t in (found.x[train], found.x_test[test]))
    if flat:
        x, x_test = (nn.functional.avg_pool2d(t, 2).flatten(1) for t in (x, x_test))
    return Data(x, found.y[train], x_test, found.y_test[test], 10)


def third_token_task(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eight tokens of seven kinds; the label is the third of them."""
    x = torch.randint(0, 7, (n, 8), generator=torch.Generator().manual_seed(seed))
    return x, x[:, 2]


def majority_task(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten tokens of six kinds; the label is the most frequent one (the lowest of equals)."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 6, (n, 10), generator=rng)
    return x, nn.functional.one_hot(x, 6).sum(1).argmax(1)


def marked_task(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Nine tokens of six kinds; one of them is marked (it has another id), and the label is its kind."""
    rng = torch.Generator().manual_seed(seed)
    kinds, place = torch.randint(0, 6, (n, 9), generator=rng), torch.randint(0, 9, (n, 1), generator=rng)
    return kinds.scatter_add(1, place, torch.full_like(place, 6)), kinds.gather(1, place)[:, 0]


TOKENS = {"third": (third_token_task, 7), "majority": (majority_task, 6), "marked": (marked_task, 6)}


def build(setup: Any, data: Data) -> nn.Module:
    kind, act = setup.network, ACTIVATIONS[setup.activation]
    if kind == "mlp":
        return _mlp(setup, data, act)
    if kind == "cnn":
        return _cnn(setup, data, act)
    if kind == "strided":
        return _strided(setup, data, act)
    if kind in ("transformer", "causal"):
        return Encoder(setup, data, act)
    return Recurrent(kind, data.x.shape[2], setup.width, data.y.shape[2])


def _mlp(setup: Any, data: Data, act: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    fan_in = data.x.shape[1]
    for _ in range(setup.depth):
        layers += [nn.Linear(fan_in, setup.width), *([nn.BatchNorm1d(setup.width)] if setup.norm else []), act()]
        layers += [nn.Dropout(setup.dropout)] if setup.dropout else []
        fan_in = setup.width
    return nn.Sequential(*layers, nn.Linear(fan_in, data.classes))


def _cnn(setup: Any, data: Data, act: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    channels = data.x.shape[1]
    for place in range(setup.depth):
        layers += [nn.Conv2d(channels, setup.width, 3, padding=1)]
        layers += [nn.BatchNorm2d(setup.width)] if setup.norm else []
        layers += [act(), *([nn.AvgPool2d(2)] if place == 0 else [])]
        layers += [nn.Dropout(setup.dropout)] if setup.dropout else []
        channels = setup.width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(setup.width * 16, data.classes))


def _strided(setup: Any, data: Data, act: type[nn.Module]) -> nn.Module:
    """Convolutions of which the first two halve the image, and a mean over all positions before the head."""
    layers: list[nn.Module] = []
    channels = data.x.shape[1]
    for place in range(setup.depth):
        layers += [nn.Conv2d(channels, setup.width, 3, stride=2 if place < 2 else 1, padding=1)]
        layers += [nn.BatchNorm2d(setup.width)] if setup.norm else []
        layers += [act(), *([nn.Dropout(setup.dropout)] if setup.dropout else [])]
        channels = setup.width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(setup.width, data.classes))


class Block(nn.Module):
    """Attention and units; ``setup.residual`` False leaves out the skip connections, ``norm`` False the layer norms.

    Of the network "causal" a token sees only those before it.
    """

    def __init__(self, setup: Any, act: type[nn.Module]) -> None:
        super().__init__()
        d = setup.width
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.down, self.act = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), act()
        normed = setup.norm
        self.norm1, self.norm2 = (nn.LayerNorm(d), nn.LayerNorm(d)) if normed else (nn.Identity(), nn.Identity())
        self.residual, self.post, self.units = setup.residual, setup.post_norm, setup.units
        self.causal = setup.network == "causal"

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.residual else 0.0
        if self.post:
            x = self.norm1(skip + self._attend(x))
            return self.norm2(x + self.down(self.act(self.up(x))))
        x = skip + self._attend(self.norm1(x))
        if not self.units:
            return x
        return (x if self.residual else 0.0) + self.down(self.act(self.up(self.norm2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.attention(x, x, x, attn_mask=later, need_weights=False)[0]


class Encoder(nn.Module):
    """A small transformer; logits from the mean over tokens, or from the last one where it is causal."""

    def __init__(self, setup: Any, data: Data, act: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(int(data.x.max()) + 1, setup.width)
        self.position = nn.Parameter(torch.randn(data.x.shape[1], setup.width) / setup.width**0.5)
        self.blocks = nn.ModuleList(Block(setup, act) for _ in range(setup.depth))
        self.dropout = nn.Dropout(setup.dropout)
        self.head = nn.Linear(setup.width, data.classes)
        self.causal = setup.network == "causal"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embed(ids) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1] if self.causal else x.mean(1))


class Recurrent(nn.Module):
    """A recurrent layer with a linear readout at every step."""

    def __init__(self, kind: str, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        makers = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN, "gru2": partial(nn.GRU, num_layers=2)}
        self.cell = makers[kind](inputs, width, batch_first=True)
        self.readout = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.cell(x)[0])


class Scaled(nn.Module):
    """``scale (f - f₀)``: the lazy regime of Chizat et al. (arXiv:1812.07956) where the scale is large."""

    def __init__(self, body: nn.Module, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, scale
        self.start = [p.detach().clone() for p in body.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        names = [name for name, _ in self.body.named_parameters()]
        first = torch.func.functional_call(self.body, dict(zip(names, self.start, strict=True)), (x,))
        return self.scale * (self.body(x) - first.detach())
