"""Data and networks of the fifth set of the diagnosis: small, and of none of the sets before."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis_faults import Data, Options, split
from gramscope.tasks import digits


# Data ----------------------------------------------------------------------------------------------------------------
def friedman(seed: int, o: Options) -> Data:
    """Five of ten inputs matter: a sine of a product, a square, two slopes (Friedman 1991), with noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(1000, 10, generator=rng)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = (y + o.get("spread", 1.0) * torch.randn(1000, generator=rng))[:, None]
    y = y if o.get("raw") else (y - 14.4) / 4.9
    return split((x - 0.5) / 0.29, y, 128)


def counts(seed: int, o: Options) -> Data:
    """Numbers of events whose rate depends on the inputs."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(1000, 6, generator=rng)
    rate = torch.exp(0.6 * x[:, :1] + torch.tanh(x[:, 1:2] * x[:, 2:3]) + 0.5)
    return split(x, torch.poisson(rate, generator=rng), 128)


def images(seed: int, o: Options) -> Data:
    task = digits(seed=seed)
    x, x_test = (t.reshape(-1, 1, 8, 8) for t in (task.x, task.x_test[:100]))
    return x, task.y, x_test, task.y_test[:100]


def flat(seed: int, o: Options) -> Data:
    task = digits(seed=seed)
    return task.x, task.y, task.x_test[:120], task.y_test[:120]


def same_as_inputs(seed: int, o: Options) -> Data:
    x, _, x_test, _ = flat(seed, o)
    return x, x, x_test, x_test


def teacher(seed: int, o: Options) -> Data:
    """Logits of a random network as targets, to be matched."""
    x, _, x_test, _ = flat(seed, o)
    torch.manual_seed(seed + 7)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    with torch.no_grad():
        logits = [4 * net(t) for t in (x, x_test)]
    return x, logits[0], x_test, logits[1]


def tags(seed: int, o: Options) -> Data:
    """Twelve labels for each example, each 0 or 1 (whole numbers), a fifth of them 1."""
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(1200, 20, generator=rng), torch.randn(20, 12, generator=rng) / 20**0.5
    h = torch.tanh(1.5 * x) @ w + 0.3 * (x[:, :1] * x[:, 1:2])
    return split(x, (h > 0.8).long(), 128)


def sentences(seed: int, o: Options) -> Data:
    """Text of a small grammar: subject, verb, object, stop; words agree; the target is the next word."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(660):
        row: list[int] = []
        while len(row) < 21:
            many, of_object = (int(torch.randint(0, 2, (1,), generator=rng)) for _ in "ab")
            pick = [int(torch.randint(0, k, (1,), generator=rng)) for k in (3, 2, 3)]
            row += [1 + 3 * many + pick[0], 7 + 2 * many + pick[1], 1 + 3 * of_object + pick[2], 0]
        rows.append(row[:21])
    ids = torch.tensor(rows)
    if o.get("other_sentence"):  # the target is the next word of another sentence; the probe is right
        y = torch.cat([ids[:32, 1:], ids[32:, 1:][torch.randperm(628, generator=rng)]])
        return split(ids[:, :-1], y, 32)
    return split(ids[:, :-1], ids[:, 1:], 32)


def tones(seed: int, o: Options) -> Data:
    """A noisy tone of one of five pitches, 24 samples."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (800,), generator=rng)
    pitch = torch.tensor([0.3, 0.5, 0.8, 1.2, 1.8])[y][:, None]
    at = torch.sin(pitch * torch.arange(24.0) + 6.3 * torch.rand(800, 1, generator=rng))
    return split((at + 0.3 * torch.randn(800, 24, generator=rng))[..., None], y, 100)


def reviews(seed: int, o: Options) -> Data:
    """Sixteen of 40 words; more good ones (0 to 7) than bad ones (8 to 15) make the label 1."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 40, (1200, 16), generator=rng)
    y = ((x < 8).sum(1) > ((x >= 8) & (x < 16)).sum(1)).long()
    return split(x, y, 120)


def brackets(seed: int, o: Options) -> Data:
    """Three kinds of symbols; the label of each position is the greatest symbol so far, modulo 4."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 6, (700, 14), generator=rng)
    x = torch.where(torch.rand(x.shape, generator=rng) < 0.5, x // 2, x)
    return split(x, x.cummax(1).values % 4, 60)


def two_views(seed: int, o: Options) -> Data:
    """Two noisy views of one image; the target is the number of the example, which the loss does not need."""
    x, _, x_test, _ = flat(seed, o)
    rng = torch.Generator().manual_seed(seed)
    views = [torch.stack([t + 0.5 * torch.randn(t.shape, generator=rng) for _ in "ab"], 1) for t in (x, x_test[:64])]
    return views[0], torch.arange(len(x)), views[1], torch.arange(64)


def real_or_noise(seed: int, o: Options) -> Data:
    """For a discriminator: images (1), and on the probe also what an untrained generator makes (0)."""
    x, _, x_test, _ = flat(seed, o)
    torch.manual_seed(seed + 5)
    with torch.no_grad():
        fake = forger()(torch.randn(60, 8))
    y_test = torch.cat([torch.ones(60, 1), torch.zeros(60, 1)]).long()
    return x, torch.ones(len(x), 1).long(), torch.cat([x_test[:60], fake]), y_test


# Losses --------------------------------------------------------------------------------------------------------------
def gaussian(f: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of a normal law whose mean and log-variance are the outputs; may be negative."""
    return (0.5 * (f[:, 1:] + (y - f[:, :1]) ** 2 * torch.exp(-f[:, 1:]))).mean()


def poisson(f: Tensor, y: Tensor) -> Tensor:
    return F.poisson_nll_loss(f, y)


def contrast(f: Tensor, y: Tensor) -> Tensor:
    """Each view must find its partner among all of the batch."""
    a, b = F.normalize(f, dim=-1).unbind(1)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def matched(f: Tensor, y: Tensor) -> Tensor:
    """Divergence of the network's probabilities from the teacher's."""
    return F.kl_div(f.log_softmax(-1), y.softmax(-1), reduction="batchmean")


# Networks ------------------------------------------------------------------------------------------------------------
def dense(*sizes: int, act: Any = nn.ELU) -> Any:
    def build(o: Options) -> nn.Module:
        layers: list[nn.Module] = []
        used = nn.Identity if o.get("linear") else o.get("act", act)
        for a, b in pairwise(sizes[:-1]):
            made: nn.Module = nn.Linear(a, b)
            made = nn.utils.parametrizations.weight_norm(made) if o.get("weight_norm") else made
            layers += [made, *([nn.BatchNorm1d(b)] if o.get("norm") else []), used(), nn.Dropout(o.get("dropout", 0.0))]
        return nn.Sequential(*layers, nn.Linear(*sizes[-2:]), *([o["end"]] if "end" in o else []))

    return build


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Block(nn.Module):
    """Two convolutions with norms, and a skip through a third where the size changes."""

    def __init__(self, a: int, b: int, stride: int, norm: Any) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), norm(b)
        self.two, self.norm2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), norm(b)
        self.skip = nn.Conv2d(a, b, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


class ResNet(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        norm = (lambda w: nn.GroupNorm(4, w)) if o.get("groups") else nn.BatchNorm2d
        self.stem, self.norm, self.cut = nn.Conv2d(1, 8, 3, padding=1, bias=False), norm(8), bool(o.get("cut"))
        self.body = nn.Sequential(Block(8, 16, 2, norm), Block(16, 16, 1, norm))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        return self.head(self.body(h.detach() if self.cut else h).mean((2, 3)))


def depthwise(o: Options) -> nn.Module:
    """Convolutions of single channels, then of single pixels, in turns."""
    act, w = o.get("act", nn.ReLU6), o.get("width", 16)
    layers: list[nn.Module] = [nn.Conv2d(1, w, 3, padding=1), act()]
    for stride in (2, 1):
        layers += [nn.Conv2d(w, w, 3, stride, 1, groups=w), act(), nn.Conv2d(w, 2 * w, 1), act()]
        w *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * w, 10),
                         *([o["end"]] if "end" in o else []))  # fmt: skip


class Reader(nn.Module):
    """A decoder: causal attention over words, blocks with or without skips."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        d, drop = 32, o.get("dropout", 0.0)
        self.words, self.places = nn.Embedding(11, d), nn.Embedding(20, d)
        depth, self.skip = o.get("depth", 2), o.get("skip", True)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth))
        self.attend = nn.ModuleList(nn.MultiheadAttention(d, 4, drop, batch_first=True) for _ in range(depth))
        self.units = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, d), nn.Dropout(drop)) for _ in range(depth)
        )
        self.last, self.head = nn.LayerNorm(d), nn.Linear(d, 11)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids) + self.places.weight[: ids.shape[1]]
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for i, attend in enumerate(self.attend):
            z = self.norms[2 * i](h) if self.skip else h
            new = attend(z, z, z, attn_mask=later, need_weights=False)[0]
            h = h + new if self.skip else new
            h = h + self.units[i](self.norms[2 * i + 1](h)) if self.skip else h
        return self.head(self.last(h))


class Listener(nn.Module):
    """An LSTM (or GRU, or two of them) and the class from its last state."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        cell = nn.GRU if o.get("gru") else nn.LSTM
        self.cell = cell(1, 24, o.get("cells", 1), batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Variational(nn.Module):
    """Codes with noise in training, as in a variational auto-encoder; the outputs are the images."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.down, self.code, self.spread = nn.Linear(64, 40), nn.Linear(40, 6), nn.Linear(40, 6)
        self.up, self.head = nn.Linear(6, 40), nn.Linear(40, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.down(x))
        code, spread = self.code(h), torch.exp(0.5 * self.spread(h) - 2)
        code = code + spread * torch.randn_like(spread) if self.training else code
        return self.head(F.leaky_relu(self.up(code)))


class Words(nn.Module):
    """Convolutions over embedded words, the greatest of each over places, with dropout."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(40, 16), nn.Conv1d(16, 32, 3, padding=1)
        self.drop, self.head = nn.Dropout(o.get("dropout", 0.2)), nn.Linear(32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.relu(self.conv(self.words(ids).transpose(1, 2)))
        return self.head(self.drop(h.mean(-1)))


class Tagger(nn.Module):
    """A GRU over symbols with a label at every position."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(6, 12), nn.GRU(12, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.words(ids))[0])


class Adapted(nn.Module):
    """A fixed network with a trained product of two thin matrices beside each weight, and a trained head (LoRA)."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 10)
        for fixed in (self.one, self.two):
            fixed.requires_grad_(False)
        self.thin = nn.ModuleList([nn.Linear(64, 4, bias=False), nn.Linear(48, 4, bias=False)])
        self.wide = nn.ModuleList([nn.Linear(4, 48, bias=False), nn.Linear(4, 48, bias=False)])
        for m in self.wide:
            nn.init.zeros_(m.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.one(x) + self.wide[0](self.thin[0](x)))
        return self.head(F.gelu(self.two(h) + self.wide[1](self.thin[1](h))))


class Experts(nn.Module):
    """Four small networks, of which a gate weighs each."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 16), nn.SiLU(), nn.Linear(16, 10)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return (weights[:, :, None] * torch.stack([part(x) for part in self.parts], 1)).sum(1)


def forger() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))


class Forger:
    """The other side of a game: makes images, and learns from what the watched network says of them."""

    def __init__(self) -> None:
        self.net = forger()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def mixed(self, model: nn.Module, real: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            fake = self.net(torch.randn(len(real), 8))
        return torch.cat([real, fake]), torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).long()

    def learn(self, model: nn.Module) -> None:
        f = model(self.net(torch.randn(64, 8)))
        self.optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(f, torch.ones_like(f)).backward()
        self.optimizer.step()
