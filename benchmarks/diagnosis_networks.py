"""Small networks and tasks for the sabotaged and healthy runs of benchmarks/diagnosis.py."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.tasks import digits, memory_pro, modular


@dataclass(frozen=True)
class Data:
    """Examples for training and others that are held out; ``classes`` is 0 for numbers."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int


ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid}


def data_for(task: str, seed: int) -> Data:
    if task == "digits":
        found = digits(seed=seed)
        return Data(found.x, found.y, found.x_test[:160], found.y_test[:160], 10)
    if task == "images":
        found = digits(seed=seed)
        x, x_test = found.x.reshape(-1, 1, 8, 8), found.x_test[:128].reshape(-1, 1, 8, 8)
        return Data(x, found.y, x_test, found.y_test[:128], 10)
    if task == "third":
        x, y = third_token_task(1500, seed)
        return Data(x[:1400], y[:1400], x[1400:], y[1400:], 7)
    if task == "majority":
        x, y = majority_task(1500, seed)
        return Data(x[:1400], y[:1400], x[1400:], y[1400:], 6)
    if task in ("modular", "modular_flat"):
        p = 23
        found = modular(p, seed=seed, train=0.6)
        x, x_test = found.x, found.x_test
        if task == "modular_flat":
            x, x_test = (nn.functional.one_hot(t[:, :2], p).flatten(1).float() * math.sqrt(p) / 2 for t in (x, x_test))
        return Data(x, found.y, x_test[:96], found.y_test[:96], p)
    if task == "memory":
        times = {"fixation": 3, "stimulus": 4, "delay": 5, "response": 4}
        train, test = memory_pro(512, seed=seed, noise=0.1, **times), memory_pro(64, seed=seed + 99, noise=0.1, **times)
        order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        return Data(train.x[order], train.y[order], test.x, test.y, 0)
    raise ValueError(task)


def third_token_task(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eight tokens of seven kinds; the label is the third of them."""
    x = torch.randint(0, 7, (n, 8), generator=torch.Generator().manual_seed(seed))
    return x, x[:, 2]


def majority_task(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten tokens of six kinds; the label is the most frequent one (the lowest of equals)."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 6, (n, 10), generator=rng)
    return x, nn.functional.one_hot(x, 6).sum(1).argmax(1)


def build(setup: Any, data: Data) -> nn.Module:
    kind, act = setup.network, ACTIVATIONS[setup.activation]
    if kind == "mlp":
        return _mlp(setup, data, act)
    if kind == "cnn":
        return _cnn(setup, data, act)
    if kind == "transformer":
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


class Block(nn.Module):
    """Attention and units; ``setup.residual`` False leaves out the skip connections, ``norm`` False the layer norms."""

    def __init__(self, setup: Any, act: type[nn.Module]) -> None:
        super().__init__()
        d = setup.width
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.down, self.act = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), act()
        normed = setup.norm
        self.norm1, self.norm2 = (nn.LayerNorm(d), nn.LayerNorm(d)) if normed else (nn.Identity(), nn.Identity())
        self.residual, self.post, self.units = setup.residual, setup.post_norm, setup.units

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.residual else 0.0
        if self.post:
            x = self.norm1(skip + self.attention(x, x, x, need_weights=False)[0])
            return self.norm2(x + self.down(self.act(self.up(x))))
        h = self.norm1(x)
        x = skip + self.attention(h, h, h, need_weights=False)[0]
        if not self.units:
            return x
        return (x if self.residual else 0.0) + self.down(self.act(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A small transformer; logits from the mean over tokens."""

    def __init__(self, setup: Any, data: Data, act: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(int(data.x.max()) + 1, setup.width)
        self.position = nn.Parameter(torch.randn(data.x.shape[1], setup.width) / setup.width**0.5)
        self.blocks = nn.ModuleList(Block(setup, act) for _ in range(setup.depth))
        self.dropout = nn.Dropout(setup.dropout)
        self.head = nn.Linear(setup.width, data.classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embed(ids) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """A recurrent layer with a linear readout at every step."""

    def __init__(self, kind: str, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.cell = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[kind](inputs, width, batch_first=True)
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
