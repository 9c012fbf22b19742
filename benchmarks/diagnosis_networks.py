"""Small networks and tasks for the sabotaged and healthy runs of benchmarks/diagnosis.py."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis_faults import Data, Options
from gramscope.tasks import Task, digits, flip_flop, line_attractor, memory_pro, mnist, modular


# Data ----------------------------------------------------------------------------------------------------------------
def flat_digits(seed: int, o: Options) -> Data:
    found = digits(seed=seed)
    return found.x, found.y, found.x_test[:160], found.y_test[:160]


def digit_images(seed: int, o: Options) -> Data:
    found = digits(seed=seed)
    x, x_test = (t.reshape(-1, 1, 8, 8) for t in (found.x, found.x_test[:128]))
    return x, found.y, x_test, found.y_test[:128]


@cache
def _files(name: str) -> Task:
    """Some thousands of 28 x 28 images, read once in a process."""
    found = mnist(name, train=6000, test=2000)
    return Task(found.x.clone(), found.y.clone(), found.x_test.clone(), found.y_test.clone())


def pictures(name: str, flat: bool) -> Callable[[int, Options], Data]:
    """1,400 images of Fashion-MNIST or MNIST; ``flat``: means of 2 x 2 pixels, as rows of 196."""

    def data(seed: int, o: Options) -> Data:
        found, rng = _files(name), torch.Generator().manual_seed(seed)
        train = torch.randperm(6000, generator=rng)[:1400]
        test = torch.randperm(2000, generator=rng)[: 160 if flat else 128]
        x, x_test = (t.reshape(-1, 1, 28, 28) for t in (found.x[train], found.x_test[test]))
        if flat:
            x, x_test = (F.avg_pool2d(t, 2).flatten(1) for t in (x, x_test))
        return x, found.y[train], x_test, found.y_test[test]

    return data


def tokens(task: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]) -> Callable[[int, Options], Data]:
    def data(seed: int, o: Options) -> Data:
        x, y = task(1500, torch.Generator().manual_seed(seed))
        return x[:1400], y[:1400], x[1400:], y[1400:]

    return data


def majority(n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten tokens of six kinds; the label is the most frequent one (the lowest of equals)."""
    x = torch.randint(0, 6, (n, 10), generator=rng)
    return x, F.one_hot(x, 6).sum(1).argmax(1)


def marked(n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Nine tokens of six kinds; one of them is marked (it has another id), and the label is its kind."""
    kinds, place = torch.randint(0, 6, (n, 9), generator=rng), torch.randint(0, 9, (n, 1), generator=rng)
    return kinds.scatter_add(1, place, torch.full_like(place, 6)), kinds.gather(1, place)[:, 0]


def counted(n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Twelve tokens of five kinds; the label is how often the first kind occurs, from 0 to 4 and more."""
    wanted = torch.randint(0, 5, (n, 1), generator=rng)
    other = torch.randint(1, 5, (n, 12), generator=rng)
    return torch.where(torch.rand(n, 12, generator=rng).argsort(1).argsort(1) < wanted, 0, other), wanted[:, 0]


def sums(flat: bool) -> Callable[[int, Options], Data]:
    """Addition modulo 23, of tokens or of one-hot rows."""

    def data(seed: int, o: Options) -> Data:
        found = modular(23, seed=seed, train=0.6)
        x, x_test = found.x, found.x_test
        if flat:
            x, x_test = (F.one_hot(t[:, :2], 23).flatten(1).float() * math.sqrt(23) / 2 for t in (x, x_test))
        return x, found.y, x_test[:96], found.y_test[:96]

    return data


def trials(task: Callable[..., Any], **settings: Any) -> Callable[[int, Options], Data]:
    """512 trials of a recurrent task, in random order, and 64 others."""

    def data(seed: int, o: Options) -> Data:
        train, test = (task(n, seed=s, **settings) for n, s in ((512, seed), (64, seed + 99)))
        order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        return train.x[order], train.y[order], test.x, test.y

    return data


def _two_integrals(n: int, seed: int) -> Task:
    """Two inputs, and the sum of each up to now."""
    one, two = (line_attractor(n, seed=s, steps=20) for s in (seed, seed + 1000))
    return Task(torch.cat([one.x, two.x], -1), torch.cat([one.y, two.y], -1), one.x, one.y)


memory = trials(memory_pro, noise=0.1, fixation=3, stimulus=4, delay=5, response=4)
switches = trials(flip_flop, steps=16, bits=2, rate=0.2)
integrals = trials(_two_integrals)


# Networks: of the options sizes (inputs, outputs), width, depth, act, norm, dropout -----------------------------------
def dense(o: Options) -> nn.Module:
    layers, fan_in = list[nn.Module](), o["sizes"][0]
    for _ in range(o.get("depth", 2)):
        layers += [nn.Linear(fan_in, o["width"]), *_between(o, nn.BatchNorm1d)]
        fan_in = o["width"]
    return nn.Sequential(*layers, nn.Linear(fan_in, o["sizes"][1]))


def _between(o: Options, norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    drop = [nn.Dropout(o["dropout"])] if o.get("dropout") else []
    return [*([norm(o["width"])] if o.get("norm") else []), o.get("act", nn.ReLU)(), *drop]


def convolutional(o: Options) -> nn.Module:
    """Convolutions with a pooling after the first, and a head over all positions."""
    layers, channels = list[nn.Module](), o["sizes"][0]
    for place in range(o.get("depth", 2)):
        layers += [nn.Conv2d(channels, o["width"], 3, padding=1), *_between(o, nn.BatchNorm2d)]
        layers += [nn.AvgPool2d(2)] if place == 0 else []
        channels = o["width"]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(o["width"] * 16, o["sizes"][1]))


def strided(o: Options) -> nn.Module:
    """Convolutions of which the first two halve the image, and a mean over all positions before the head."""
    layers, channels = list[nn.Module](), o["sizes"][0]
    for place in range(o.get("depth", 2)):
        layers += [nn.Conv2d(channels, o["width"], 3, stride=2 if place < 2 else 1, padding=1)]
        layers += _between(o, nn.BatchNorm2d)
        channels = o["width"]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(o["width"], o["sizes"][1]))


def pooled(o: Options) -> nn.Module:
    """A convolution of 5 x 5 that halves the image, the greatest of 2 x 2, convolutions; a head over 3 x 3 means."""
    layers: list[nn.Module] = [nn.Conv2d(o["sizes"][0], o["width"], 5, stride=2, padding=2)]
    layers += [*_between(o, nn.BatchNorm2d), nn.MaxPool2d(2)]
    for _ in range(o.get("depth", 2) - 1):
        layers += [nn.Conv2d(o["width"], o["width"], 3, padding=1), *_between(o, nn.BatchNorm2d)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * o["width"], o["sizes"][1]))


class Block(nn.Module):
    """Attention and units; ``residual`` False leaves out the skip connections, ``norm`` False the layer norms.

    ``causal``: a token sees only those before it.
    """

    def __init__(self, o: Options) -> None:
        super().__init__()
        d = o["width"]
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.down, self.act = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), o.get("act", nn.ReLU)()
        self.norm1, self.norm2 = (nn.LayerNorm(d) if o.get("norm") else nn.Identity() for _ in "ab")
        self.residual, self.post, self.causal = o.get("residual", True), o.get("post_norm"), o.get("causal")

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.residual else 0.0
        if self.post:
            x = self.norm1(skip + self._attend(x))
            return self.norm2(x + self.down(self.act(self.up(x))))
        x = skip + self._attend(self.norm1(x))
        return (x if self.residual else 0.0) + self.down(self.act(self.up(self.norm2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.attention(x, x, x, attn_mask=later, need_weights=False)[0]


class Encoder(nn.Module):
    """A small transformer; logits from the mean over tokens, or from the last one where it is causal.

    ``sizes``: kinds of tokens, tokens of an example, classes.
    """

    def __init__(self, o: Options) -> None:
        super().__init__()
        (kinds, length, classes), d = o["sizes"], o["width"]
        self.embed, self.position = nn.Embedding(kinds, d), nn.Parameter(torch.randn(length, d) / d**0.5)
        self.blocks = nn.ModuleList(Block(o) for _ in range(o.get("depth", 2)))
        self.dropout, self.head = nn.Dropout(o.get("dropout", 0.0)), nn.Linear(d, classes)
        self.causal = o.get("causal")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embed(ids) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1] if self.causal else x.mean(1))


CELLS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN, "gru2": partial(nn.GRU, num_layers=2)}


class Recurrent(nn.Module):
    """A recurrent layer with a linear readout at every step."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.cell = CELLS[o["cell"]](o["sizes"][0], o["width"], batch_first=True)
        self.readout = nn.Linear(o["width"], o["sizes"][1])

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.cell(x)[0])
