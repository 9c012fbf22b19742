"""The fourth set of the diagnosis: networks, tasks and faults of none of the sets before, held out.

``right`` of each fault, what counts as right, was written down before any of these runs was judged. Needs scikit-learn,
for its data.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis_faults import Data
from diagnosis_loop import Base, Lion, by, makers
from gramscope.tasks import digits


# Data ----------------------------------------------------------------------------------------------------------------
def _table(name: str, seed: int, raw: bool = False) -> Data:
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    x, y = torch.tensor(found.data).float(), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y, held = x[order], y[order], len(x) // 4
    x = x if raw else (x - x.mean(0)) / x.std(0)
    return x[held:], y[held:], x[:held], y[:held]


def wine(seed: int, o: dict[str, Any]) -> Data:
    x, y, x_test, y_test = _table("wine", seed, bool(o.get("raw")))
    return x, y.long(), x_test, y_test.long()


def cancer(seed: int, o: dict[str, Any]) -> Data:
    x, y, x_test, y_test = _table("breast_cancer", seed)
    return x, y.float()[:, None], x_test, y_test.float()[:, None]


def diabetes(seed: int, o: dict[str, Any]) -> Data:
    x, y, x_test, y_test = (t.float() for t in _table("diabetes", seed))
    y, y_test = y[:, None], y_test[:, None]
    return (x, y, x_test, y_test) if o.get("raw") else (x, (y - 152) / 77, x_test, (y_test - 152) / 77)


def denoised(seed: int, o: dict[str, Any]) -> Data:
    """Images of 8 x 8 pixels under noise; the targets are the images."""
    task, rng = digits(seed=seed), torch.Generator().manual_seed(seed)
    clean = [t.reshape(-1, 1, 8, 8) for t in (task.x, task.x_test[:96])]
    noisy = [t + 0.7 * torch.randn(t.shape, generator=rng) for t in clean]
    a, b = (200.0, 1000.0) if o.get("raw") else (1.0, 0.0)
    return noisy[0], a * clean[0] + b, noisy[1], a * clean[1] + b


def patches(seed: int, o: dict[str, Any]) -> Data:
    task = digits(seed=seed)
    few = o.get("few", 128)  # where attention is saturated, each backward pass of the kernel takes a minute
    x, x_test = (t.reshape(-1, 1, 8, 8) for t in (task.x, task.x_test[:few]))
    return x, task.y, x_test, task.y_test[:few]


def graphs(seed: int, o: dict[str, Any]) -> Data:
    """Twelve nodes in the plane, linked where near; three classes by the radius. Rows: coordinates, then links."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (1100,), generator=rng)
    at = torch.randn(1100, 12, 4, generator=rng)
    radius = torch.tensor([1.6, 2.1, 2.7])[y][:, None, None]
    links = (torch.cdist(at, at) < radius).float()
    x = torch.cat([at, links / links.sum(-1, keepdim=True)], -1)
    return x[:1000], y[:1000], x[1000:], y[1000:]


def waves(seed: int, o: dict[str, Any]) -> Data:
    """Sums of two sines with noise; the target of each step is the next value."""
    rng = torch.Generator().manual_seed(seed)
    rate, phase = (torch.rand(700, 2, 1, generator=rng) for _ in "ab")
    time_ = torch.arange(33.0)
    values = torch.sin((0.4 + 0.8 * rate) * time_ + 6.3 * phase).sum(1) + 0.1 * torch.randn(700, 33, generator=rng)
    x, y = values[:, :-1, None], values[:, 1:, None]
    return x[:600], y[:600], x[600:], y[600:]


def peaks(seed: int, o: dict[str, Any]) -> Data:
    """Three channels of noise over 16 steps; the class is the quarter in which the first two together are greatest."""
    x = torch.randn(1300, 16, 3, generator=torch.Generator().manual_seed(seed))
    y = x[..., :2].sum(-1).reshape(-1, 4, 4).amax(-1).argmax(-1)
    return x[:1200], y[:1200], x[1200:], y[1200:]


# Networks ------------------------------------------------------------------------------------------------------------
def table_network(o: dict[str, Any]) -> nn.Module:
    a, b = o["sizes"]
    act, drop, w = nn.SiLU, o.get("dropout", 0.0), o.get("width", 32)
    layers = [nn.Linear(a, w), *([nn.BatchNorm1d(w)] if o.get("norm") else []), act(), nn.Dropout(drop)]
    end = {"softmax": [nn.Softmax(-1)], "sigmoid": [nn.Sigmoid()]}.get(o.get("end", ""), [])
    return nn.Sequential(*layers, nn.Linear(w, w), act(), nn.Linear(w, b), *end)


class UNet(nn.Module):
    """Down, across, up, with the first features beside the last."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        w = 8
        self.act = nn.Identity() if o.get("linear") else nn.ReLU()
        self.first, self.down = nn.Conv2d(1, w, 3, padding=1), nn.Conv2d(w, 2 * w, 3, stride=2, padding=1)
        self.across, self.up = nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.last = nn.Conv2d(2 * w, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.act(self.first(x))
        low = self.act(self.across(self.act(self.down(beside))))
        return self.last(torch.cat([beside, self.act(self.up(low))], 1))


class Graph(nn.Module):
    """Means over neighbours and units, in turns; the class from the mean over nodes."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        w, self.times, self.skip = 24, o.get("times", 1), o.get("skip", True)
        self.first = nn.Linear(4, w)
        self.rounds = nn.ModuleList(nn.Linear(w, w) for _ in range(o.get("rounds", 2)))
        self.norm = nn.LayerNorm(w) if o.get("norm") else nn.Identity()
        self.head = nn.Linear(w, 3)

    def forward(self, x: Tensor) -> Tensor:
        at, links = x[..., :4], x[..., 4:]
        h = F.relu(self.first(at))
        for layer in self.rounds:
            for _ in range(self.times):
                new = F.relu(layer(links @ h))
                h = self.norm(h + new if self.skip else new)
        return self.head(h.mean(1))


class Causal(nn.Module):
    """Convolutions over time that see no later step, with gaps that double."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        w, depth = 16, o.get("depth", 3)
        self.layers = nn.ModuleList(nn.Conv1d(1 if i == 0 else w, w, 2, dilation=2 ** (i % 4)) for i in range(depth))
        self.act, self.head = o.get("act", nn.GELU)(), nn.Conv1d(w, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        for layer in self.layers:
            h = self.act(layer(F.pad(h, (layer.dilation[0], 0))))
        return self.head(h).transpose(1, 2)


class BothWays(nn.Module):
    """A GRU in both directions; the class from the mean of its states."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 20, batch_first=True, bidirectional=True), nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0].mean(1))


class ViT(nn.Module):
    """Sixteen patches of 2 x 2 pixels and a token for the class."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        d = 32
        self.patch, self.place = nn.Linear(4, d), nn.Parameter(0.1 * torch.randn(17, d))
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, d))
        self.body = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 2 * d, o.get("dropout", 0.0), "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(F.unfold(x, 2, stride=2).transpose(1, 2))
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.place
        for block in self.body:
            h = block(h)
        return self.head(self.norm(h[:, 0]))


# Runs ----------------------------------------------------------------------------------------------------------------
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
BASES = {
    "unet": Base(denoised, UNet, by(Adam, lr=3e-3), {}),
    "graph": Base(graphs, Graph, by(Adam, lr=5e-3), {}),
    "causal": Base(waves, Causal, by(Adam, lr=5e-3), {"batch": 32}),
    "bigru": Base(peaks, BothWays, by(Adam, lr=1e-2), {}),
    "wine": Base(wine, table_network, by(Adam, lr=3e-3), {"sizes": (13, 3), "batch": 32}),
    "cancer": Base(cancer, table_network, by(SGD, lr=0.05, momentum=0.9), {"sizes": (30, 1), "batch": 32}),
    "diabetes": Base(diabetes, table_network, by(AdamW, lr=5e-4, weight_decay=0.01), {"sizes": (10, 1), "batch": 32}),
    "vit": Base(patches, ViT, by(AdamW, lr=2e-3, weight_decay=0.05), {}),
}
broken, sound = makers(BASES)
FAULTS = [
    broken("unet", "no activation", "no_activation", linear=True),
    broken("unet", "gradients clipped to 1e-3", "clipping_always", by(SGD, lr=0.05, momentum=0.9), clip=1e-3),
    broken("unet", "targets of 200 y + 1,000", "targets_not_normalized", raw=True),
    broken("unet", "weights in bfloat16, SGD at 1e-3", "half_precision", by(SGD, lr=1e-3), dtype=torch.bfloat16),
    broken("unet", "biases of -8", "dead_units", bias=-8.0),
    broken("graph", "16 means over neighbours without skips", "oversmoothing rank_collapse vanishing_signals",
           rounds=4, times=4, skip=False),
    broken("graph", "training labels shuffled", "labels memorization", shuffle=1.0),
    broken("graph", "the first layer frozen", "frozen_layer", frozen="first"),
    broken("graph", "loss summed over the batch", "lr_too_large", by(SGD, lr=0.1, momentum=0.9), reduction="sum"),
    broken("causal", "Adam at 1", "lr_too_large", by(Adam, lr=1.0)),
    broken("causal", "Adam at 5e-6", "lr_too_small", by(Adam, lr=5e-6)),
    broken("causal", "training targets three steps too late", "labels memorization", late=3),
    broken("causal", "ten layers, weights at 0.3", "vanishing_signals", depth=10, scale=0.3),
    broken("bigru", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("bigru", "batches of one", "batch_too_small", batch=1),
    broken("bigru", "weights 8 times too large", "saturated_units exploding_signals", scale=8.0),
    broken("bigru", "Lion at 0.3", "lr_too_large", by(Lion, lr=0.3)),
    broken("wine", "raw features", "inputs_not_normalized", raw=True),
    broken("wine", "no training example of class 1", "class_missing", without=1),
    broken("wine", "softmax as the last layer", "softmax_twice", end="softmax"),
    broken("wine", "examples sorted by class", "classes_in_order", sorted=True),
    broken("wine", "a probe of one class", "constant_probe", one=True),
    broken("cancer", "sigmoid before the loss with logits", "softmax_twice", twice=True),
    broken("cancer", "examples sorted by class", "classes_in_order", sorted=True),
    broken("cancer", "momentum 1", "momentum_too_large", by(SGD, lr=0.05, momentum=1.0)),
    broken("cancer", "training labels shuffled", "labels memorization", shuffle=1.0),
    broken("diabetes", "raw targets", "targets_not_normalized", raw=True),
    broken("diabetes", "the same batch always", "memorization", by(Adam, lr=5e-3), same=True),
    broken("diabetes", "NaN in one example", "not_a_number", nan=True),
    broken("diabetes", "dropout 0.9", "dropout_too_strong", dropout=0.9),
    broken("vit", "dropout 0.9", "dropout_too_strong", dropout=0.9),
    broken("vit", "weights 6 times too large", "exploding_signals saturated_units", scale=6.0, few=16),
    broken("vit", "a body that learns 10,000 times slower than the head", "head_only", body=1e-4),
    broken("vit", "weight decay 50", "weight_decay_too_strong", by(AdamW, lr=2e-3, weight_decay=50.0)),
    broken("vit", "the head not in the optimiser", "not_in_optimizer", left="head"),
    broken("vit", "the same batch always", "memorization", same=True),
    broken("vit", "in evaluation mode", "wrong_mode", evaluation=0, dropout=0.1),
    broken("vit", "softmax before cross-entropy", "softmax_twice", twice=True),
]  # fmt: skip

HEALTHY = [
    sound("unet"), sound("unet", "Nesterov", by(SGD, lr=0.1, momentum=0.9, nesterov=True)),
    sound("unet", "AdamW, cosine", by(AdamW, lr=3e-3, weight_decay=0.01), cosine=True),
    sound("unet", "Lion", by(Lion, lr=1e-3)),
    sound("graph"), sound("graph", "NAdam", by(torch.optim.NAdam, lr=5e-3)),
    sound("graph", "layer norm, three rounds", norm=True, rounds=3),
    sound("causal"), sound("causal", "AdamW, clipped to 1", by(AdamW, lr=5e-3), clip=1.0),
    sound("causal", "tanh", act=nn.Tanh),
    sound("causal", "six layers, Adamax", by(torch.optim.Adamax, lr=1e-2), depth=6),
    sound("bigru"), sound("bigru", "RAdam, clipped to 1", by(torch.optim.RAdam, lr=1e-2), clip=1.0),
    sound("bigru", "momentum", by(SGD, lr=0.3, momentum=0.9)),
    sound("wine"), sound("wine", "all examples in every batch", by(SGD, lr=0.3), batch=10**6),
    sound("wine", "batch norm", norm=True), sound("wine", "Lion", by(Lion, lr=1e-3)),
    sound("cancer"), sound("cancer", "Adam, dropout 0.3", by(Adam, lr=2e-3), dropout=0.3),
    sound("cancer", "Lion, weight decay 1", by(Lion, lr=5e-4, weight_decay=1.0)),
    sound("diabetes"), sound("diabetes", "SGD", by(SGD, lr=0.01)), sound("diabetes", "dropout 0.3", dropout=0.3),
    sound("vit"), sound("vit", "Adam, cosine", by(Adam, lr=2e-3), cosine=True),
    sound("vit", "labels smoothed by 0.1", smoothing=0.1), sound("vit", "Lion", by(Lion, lr=3e-4, weight_decay=0.1)),
]  # fmt: skip
