"""The diagnosis on networks and faults that benchmarks/diagnosis.py does not hold, by another than wrote the rules.

    python benchmarks/diagnosis_trial.py --out /tmp/trial              # trains, and prints what was said of each run
    python benchmarks/diagnosis_trial.py --out /tmp/trial --judge      # judges the folders again

What counts as right was written down before the first run: ``right`` of each fault. Faults for which there is no rule
have none; what was said of them is printed all the same. Needs Fashion-MNIST, under $GRAMSCOPE_DATA or ../shared/data.
"""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramscope as gs
from gramscope.tasks import delayed_match, digits, mnist

STEPS = 240


class Skip(nn.Module):
    """``x + body(x)``; ``cut``: the graph ends before the body's input."""

    def __init__(self, body: nn.Module, cut: bool = False) -> None:
        super().__init__()
        self.body, self.cut = body, cut

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() if self.cut else x
        return x + self.body(x)


class Mix(nn.Module):
    """A network over the tokens instead of the channels."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2)).transpose(1, 2)


class Patches(nn.Module):
    """16 patches of 7 x 7 pixels, as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return F.unfold(x, 7, stride=7).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _units(inside: int, wide: int, act: type[nn.Module], drop: float) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, wide), act(), nn.Dropout(drop), nn.Linear(wide, inside))


def mixer(o: dict[str, Any]) -> nn.Module:
    d, act, drop = 32, nn.Identity if o.get("linear") else nn.GELU, o.get("dropout", 0.0)
    blocks: list[nn.Module] = []
    for place in range(2):
        blocks += [
            Skip(nn.Sequential(nn.LayerNorm(d), Mix(_units(16, 32, act, drop))), bool(o.get("cut")) and place == 1)
        ]
        blocks += [Skip(nn.Sequential(nn.LayerNorm(d), _units(d, 64, act, drop)))]
    return nn.Sequential(Patches(), nn.Linear(49, d), *blocks, nn.LayerNorm(d), Mean(), nn.Linear(d, 10))


class Residual(nn.Module):
    def __init__(self, width: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in "ab")
        self.norm1, self.norm2, self.act = nn.BatchNorm2d(width), nn.BatchNorm2d(width), act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.norm2(self.two(self.act(self.norm1(self.one(x))))))


def resnet(o: dict[str, Any]) -> nn.Module:
    w, act = 12, nn.Identity if o.get("linear") else nn.ReLU
    stem = [nn.Conv2d(1, w, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(w), act()]
    body = [Residual(w, act), nn.AvgPool2d(2), Residual(w, act)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(o.get("dropout", 0.0)),
                         nn.Linear(w, 10))  # fmt: skip


class Rows(nn.Module):
    """The rows of an image as a sequence; the class from the last state of a tanh network."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.cell, self.head = nn.RNN(28, 48, batch_first=True), nn.Linear(48, 10)
        nn.init.orthogonal_(self.cell.weight_hh_l0, o.get("gain", 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[:, 0])[0][:, -1])


class Attend(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Two pre-norm blocks, embeddings shared with the head."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        d, act = 32, nn.Identity if o.get("linear") else nn.GELU
        self.tokens, self.places = nn.Embedding(12, d), nn.Parameter(0.02 * torch.randn(24, d))
        parts: list[nn.Module] = []
        for _ in range(2):
            parts += [Skip(nn.Sequential(nn.LayerNorm(d), Attend(d)))]
            parts += [Skip(nn.Sequential(nn.LayerNorm(d), _units(d, 64, act, o.get("dropout", 0.0))))]
        self.body, self.norm, self.head = nn.Sequential(*parts), nn.LayerNorm(d), nn.Linear(d, 12, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.tokens(ids) + self.places)))


def plain(sizes: Iterable[int], act: type[nn.Module] = nn.ReLU, drop: float = 0.0) -> nn.Module:
    sizes, layers = list(sizes), list[nn.Module]()
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), act(), *([nn.Dropout(drop)] if drop else [])]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


# Data: (x, y, x of the probe, y of the probe)
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def fashion(seed: int) -> Data:
    task, rng = mnist("fashion-mnist", train=6000, test=1000), torch.Generator().manual_seed(seed)
    a, b = torch.randperm(6000, generator=rng)[:2000], torch.randperm(1000, generator=rng)[:128]
    image = [t.clone().reshape(-1, 1, 28, 28) for t in (task.x[a], task.x_test[b])]
    return image[0], task.y[a].clone(), image[1], task.y_test[b].clone()


def text(seed: int) -> Data:
    """Words of three letters that follow one another at random: 12 letters, 20 words, next letter as the target."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 12, (20, 3), generator=rng)
    ids = words[torch.randint(0, 20, (832, 9), generator=rng)].flatten(1)[:, 1:26]
    return ids[:800, :-1], ids[:800, 1:], ids[800:, :-1], ids[800:, 1:]


def smooth(seed: int) -> Data:
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(1700, 8, generator=rng), torch.randn(8, 3, generator=rng) / 8**0.5
    h = x @ w
    y = torch.sin(2 * h[:, :1]) + h[:, 1:2] * h[:, 2:3] + 0.05 * torch.randn(1700, 1, generator=rng)
    return x[:1500], y[:1500], x[1500:], y[1500:]


def two_classes(seed: int) -> Data:
    x, y, *rest = smooth(seed)
    z = rest[1]
    return x, (y > 0.3).float(), rest[0], (z > 0.3).float()


def sequences(seed: int) -> Data:
    a, b = delayed_match(500, seed=seed), delayed_match(64, seed=seed + 99)
    return a.x, a.y, b.x, b.y


def coordinates(seed: int) -> Data:
    grid = torch.stack(torch.meshgrid(*2 * (torch.linspace(-1, 1, 28),), indexing="ij"), -1).reshape(-1, 2)
    pixels = fashion(seed)[0][3].reshape(-1, 1)
    order = torch.randperm(784, generator=torch.Generator().manual_seed(seed))
    a, b = order[:600], order[600:]
    return grid[a], pixels[a], grid[b], pixels[b]


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x)


class Last(nn.Module):
    """An LSTM with a readout at every step."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(inputs, 32, batch_first=True), nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class Sets(nn.Module):
    """A function of a set of pixels: the mean of what each becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = plain((3, 64, 64), nn.ReLU), plain((64, 64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).mean(1))


def as_sets(seed: int) -> Data:
    x, y, x_test, y_test = fashion(seed)
    grid = torch.stack(torch.meshgrid(*2 * (torch.linspace(-1, 1, 14),), indexing="ij"), -1).reshape(1, -1, 2)

    def points(image: Tensor) -> Tensor:
        pixels = F.avg_pool2d(image, 2).reshape(len(image), -1, 1)
        return torch.cat([pixels, grid.expand(len(image), -1, -1)], -1)

    return points(x), y, points(x_test), y_test


def flat(seed: int) -> Data:
    x, y, x_test, y_test = fashion(seed)
    return F.avg_pool2d(x, 2).flatten(1), y, F.avg_pool2d(x_test, 2).flatten(1), y_test


def autoencoded(seed: int) -> Data:
    x, _, x_test, _ = flat(seed)
    return x, x, x_test, x_test


def sevens(seed: int) -> Data:
    found = digits(seed=seed)
    return found.x, found.y, found.x_test[:160], found.y_test[:160]


def several_labels(seed: int) -> Data:
    """Five properties of a digit, each 0 or 1."""
    x, y, x_test, y_test = sevens(seed)
    rules = (lambda t: t % 2, lambda t: t > 4, lambda t: t % 3 == 0, lambda t: t < 2, lambda t: (t == 8) | (t == 9))
    return x, torch.stack([r(y) for r in rules], 1).float(), x_test, torch.stack([r(y_test) for r in rules], 1).float()


@dataclass(frozen=True)
class Run:
    """``o``: what deviates from a plain loop; ``right``: kinds that name the fault, written down beforehand."""

    name: str
    data: Callable[[int], Data]
    network: Callable[[dict[str, Any]], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    right: tuple[str, ...] = ()
    o: dict[str, Any] = field(default_factory=dict)
    healthy: bool = False


def sgd(lr: float = 0.05, momentum: float = 0.9, **more: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum, **more)


def adamw(lr: float = 2e-3, **more: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.AdamW(p, lr=lr, **more)


def adam(lr: float = 2e-3, **more: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.Adam(p, lr=lr, **more)


def broken(base: str, name: str, right: str, optimizer: Any = None, **o: Any) -> Run:
    data, network, usual = BASES[base]
    return Run(f"{base}: {name}", data, network, optimizer or usual, tuple(right.split()), o)


BASES: dict[str, tuple[Any, Any, Any]] = {
    "mixer": (fashion, mixer, adamw()),
    "resnet": (fashion, resnet, sgd()),
    "rnn": (fashion, Rows, adam()),
    "gpt": (text, GPT, adamw(3e-3, weight_decay=0.1)),
    "regression": (smooth, lambda o: plain((8, 64, 64, 1), nn.Identity if o.get("linear") else nn.ReLU), adam(3e-3)),
    "binary": (two_classes, lambda o: plain((8, 32, 32, 1), nn.Identity if o.get("linear") else nn.ReLU), sgd(0.05)),
}
ZERO = "rank_collapse frozen_layer vanishing_signals dead_units"
FAULTS = [
    broken("resnet", "loss summed over the batch", "lr_too_large", reduction="sum"),
    broken("binary", "loss summed over the batch", "lr_too_large", reduction="sum"),
    broken("mixer", "loss summed over the batch (AdamW: harmless)", "nothing_wrong", reduction="sum"),
    broken("mixer", "training labels shifted by one", "labels memorization", shift=1),
    broken("resnet", "training labels shifted by one", "labels memorization", shift=1),
    broken("gpt", "training targets one token too late", "labels memorization", shift=1),
    broken("mixer", "softmax before cross-entropy", "", softmax=True),
    broken("resnet", "softmax before cross-entropy", "", softmax=True),
    broken("binary", "sigmoid before the loss with logits", "", softmax=True),
    broken("gpt", "AdamW at 0.1 without warm-up", "lr_too_large", adamw(0.1, weight_decay=0.1)),
    broken("rnn", "Adam at 0.1 without warm-up", "lr_too_large saturated_units", adam(0.1)),
    broken("resnet", "batch norm frozen in evaluation mode", "wrong_mode", frozen_norm=True),
    broken("resnet", "the whole network in evaluation mode", "wrong_mode", evaluation=True),
    broken("resnet", "affine part of batch norm without gradient", "frozen_layer", frozen="norm"),
    broken("resnet", "no activation", "", linear=True),
    broken("regression", "no activation", "", linear=True),
    broken("mixer", "dropout 0.95", "", dropout=0.95),
    broken("gpt", "dropout 0.95", "", dropout=0.95),
    broken("mixer", "all linear layers zero", ZERO, zero="all"),
    broken("regression", "all linear layers zero", ZERO, zero="all"),
    broken("regression", "a hidden layer zero", ZERO, zero="hidden"),
    broken("mixer", "the same batch always", "memorization", same=True),
    broken("gpt", "the same batch always", "memorization", same=True),
    broken("regression", "the same batch always", "memorization", same=True),
    broken("resnet", "weight decay 1", "weight_decay_too_strong", sgd(weight_decay=1.0)),
    broken("regression", "weight decay 1 in Adam", "weight_decay_too_strong", adam(3e-3, weight_decay=1.0)),
    broken("gpt", "weight decay 100 in AdamW", "weight_decay_too_strong", adamw(3e-3, weight_decay=100.0)),
    broken("resnet", "gradients clipped to 1e-3", "clipping_always", clip=1e-3),
    broken("binary", "gradients clipped to 1e-3", "clipping_always", clip=1e-3),
    broken("mixer", "weights in bfloat16, AdamW at 1e-4", "half_precision", adamw(1e-4), dtype=torch.bfloat16),
    broken("resnet", "weights in bfloat16, SGD at 1e-3", "half_precision", sgd(1e-3, 0.0), dtype=torch.bfloat16),
    broken("mixer", "the head replaced after the optimiser was made", "not_in_optimizer", stale=True),
    broken("mixer", "detach between two blocks", "frozen_layer", cut=True),
    broken("gpt", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("rnn", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("resnet", "a schedule that divides the rate by 10 every 10 batches", "lr_too_small", decay=True),
    broken("gpt", "a schedule that divides the rate by 10 every 10 batches", "lr_too_small", decay=True),
    broken("rnn", "pixels from 0 to 255", "inputs_not_normalized", pixels=255.0),
    broken("regression", "targets of 1,000 y + 5,000", "", targets=True),
    broken("rnn", "examples sorted by class", "classes_in_order", sorted=True),
    broken("resnet", "examples sorted by class", "classes_in_order", sorted=True),
    broken("binary", "examples sorted by class", "classes_in_order", sorted=True),
    broken("rnn", "recurrent weights 4 times too large", "saturated_units exploding_signals", gain=4.0),
    broken("gpt", "all weights 8 times too large", "exploding_signals saturated_units", scale=8.0),
    broken("regression", "biases of -10", "dead_units", bias=-10.0),
    broken("mixer", "99 % of the training examples of one class", "class_missing", imbalance=True),
    broken("binary", "the loss with the wrong sign", "lr_too_large labels", sign=-1.0),
    broken("resnet", "batches of 2", "batch_too_small", batch=2),
    broken("regression", "half of the training targets shuffled", "labels", shuffle=0.5),
    broken("binary", "all training labels shuffled", "labels", shuffle=1.0),
    broken("rnn", "a body that learns 10,000 times slower than the head", "head_only", body=1e-4),
]  # fmt: skip


def _healthy(name: str, data: Any, network: Any, optimizer: Any, **o: Any) -> Run:
    return Run(name, data, lambda o: network(), optimizer, ("nothing_wrong",), o, healthy=True)


def _deep() -> nn.Module:
    blocks = [Skip(nn.Sequential(nn.LayerNorm(32), _units(32, 64, nn.GELU, 0.0))) for _ in range(12)]
    return nn.Sequential(nn.Linear(196, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 10))


HEALTHY = [
    _healthy("mixer, AdamW", fashion, lambda: mixer({}), adamw()),
    _healthy("ResNet with batch norm, momentum, cosine schedule", fashion, lambda: resnet({}), sgd(), cosine=True),
    _healthy("tanh RNN over rows, gradients clipped to 1", fashion, lambda: Rows({}), adam(), clip=1.0),
    _healthy("GPT, AdamW 0.1, warm-up and cosine, clipped to 1", text, lambda: GPT({}), adamw(3e-3, weight_decay=0.1),
             clip=1.0, cosine=True),
    _healthy("regression, Adam", smooth, lambda: plain((8, 64, 64, 1)), adam(3e-3)),
    _healthy("two classes, one output", two_classes, lambda: plain((8, 32, 32, 1)), sgd(0.05)),
    _healthy("auto-encoder with a code of 16", autoencoded, lambda: plain((196, 64, 16, 64, 196)), adam(2e-3)),
    _healthy("logistic regression, one layer", flat, lambda: nn.Linear(196, 10), sgd(0.1)),
    _healthy("a frozen random body under a trained head", flat, lambda: plain((196, 256, 256, 10)), adam(3e-3),
             frozen="body"),
    _healthy("Adagrad", flat, lambda: plain((196, 64, 64, 10)), lambda p: torch.optim.Adagrad(p, lr=0.02)),
    _healthy("RMSprop, wide (512)", flat, lambda: plain((196, 512, 10)), lambda p: torch.optim.RMSprop(p, lr=1e-3)),
    _healthy("sines of coordinates fit an image", coordinates, lambda: plain((2, 64, 64, 1), Sine), adam(2e-3)),
    _healthy("12 residual blocks with layer norm", flat, _deep, adamw(1e-3)),
    _healthy("five labels for each example", several_labels, lambda: plain((64, 48, 5)), adam(3e-3)),
    _healthy("LSTM, delayed match, clipped to 1", sequences, lambda: Last(*_sizes(sequences)), adam(5e-3), clip=1.0),
    _healthy("all examples in every batch", sevens, lambda: plain((64, 64, 10), nn.Tanh), sgd(0.3, 0.0), batch=1297),
    _healthy("labels smoothed by 0.1, noise in the inputs", flat, lambda: plain((196, 128, 10)), adamw(1e-3),
             smoothing=0.1, noise=0.3),
    _healthy("dropout 0.5", flat, lambda: plain((196, 128, 128, 10), drop=0.5), adam(1e-3)),
    _healthy("a network of sets", as_sets, Sets, adam(3e-3)),
    _healthy("nine of ten examples of one class", two_classes, lambda: plain((8, 32, 1)), adam(3e-3), rare=True),
]  # fmt: skip


def _sizes(data: Callable[[int], Data]) -> tuple[int, int]:
    x, y, *_ = data(0)
    return x.shape[-1], y.shape[-1]


def loss_of(f: Tensor, y: Tensor, o: dict[str, Any]) -> Tensor:
    f, reduction = f.float(), o.get("reduction", "mean")
    if not y.is_floating_point():
        f = f.softmax(-1) if o.get("softmax") else f
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction=reduction,
                               label_smoothing=o.get("smoothing", 0.0))  # fmt: skip
    if ((y == 0) | (y == 1)).all():
        return F.binary_cross_entropy_with_logits(f.sigmoid() if o.get("softmax") else f, y, reduction=reduction)
    return F.mse_loss(f, y, reduction=reduction)


def _spoil_data(o: dict[str, Any], data: Data, rng: torch.Generator) -> Data:
    x, y, x_test, y_test = data
    if "shift" in o:
        y = (y + 1) % 10 if y.dim() == 1 else y.roll(-1, 1)
    if "pixels" in o:
        x, x_test = ((t - t.min()) / (t.max() - t.min()) * o["pixels"] for t in (x, x_test))
    if "targets" in o:
        y, y_test = 1000 * y + 5000, 1000 * y_test + 5000
    if "sorted" in o:
        order = y.flatten().argsort(stable=True)
        x, y = x[order], y[order]
    if "imbalance" in o:
        keep = (y == 3) | (torch.rand(len(y), generator=rng) < 0.001)
        x, y = x[keep], y[keep]
    if "shuffle" in o:
        chosen = (torch.rand(len(y), generator=rng) < o["shuffle"]).nonzero()[:, 0]
        y = y.clone()
        y[chosen] = y[chosen[torch.randperm(len(chosen), generator=rng)]]
    if "rare" in o:
        parts = [(t > 0.5)[:, 0] & (torch.rand(len(t), generator=rng) > 0.15) for t in (y, y_test)]
        x, y, x_test, y_test = x[~parts[0]], y[~parts[0]], x_test[~parts[1]], y_test[~parts[1]]
    return x, y, x_test, y_test


@torch.no_grad()
def _spoil_network(o: dict[str, Any], model: nn.Module) -> None:
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for module in linear if o.get("zero") == "all" else linear[1:2] if o.get("zero") else []:
        module.weight.zero_(), module.bias.zero_()
    for module in linear[:-1] if "bias" in o else []:
        module.bias.fill_(o["bias"])
    for p in model.parameters() if "scale" in o else []:
        p *= o["scale"] if p.dim() > 1 else 1
    if o.get("frozen") == "norm":
        for module in model.modules():
            module.requires_grad_(not isinstance(module, nn.BatchNorm2d)) if not list(module.children()) else None
    if o.get("frozen") == "body":
        for module in linear[:-1]:
            module.requires_grad_(False)


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    made: Any = [p for p in model.parameters() if p.requires_grad]
    if "body" in run.o:
        head = list(model.head.parameters())  # type: ignore[union-attr]
        body = [p for p in made if all(p is not q for q in head)]
        made = [{"params": head}, {"params": body, "lr": 2e-3 * run.o["body"]}]
    return run.optimizer(made)


def _mode(o: dict[str, Any], model: nn.Module) -> None:
    model.train("evaluation" not in o)
    for module in model.modules() if "frozen_norm" in o else []:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _batch(o: dict[str, Any], step: int, n: int, rng: torch.Generator) -> Tensor:
    size = min(o.get("batch", 64), n)
    if o.get("same"):
        return torch.arange(size)
    if o.get("sorted"):
        return torch.arange(size) + (n - size) * step // STEPS
    return torch.arange(n) if size == n else torch.randint(0, n, (size,), generator=rng)


def _rate(o: dict[str, Any], step: int) -> float:
    if o.get("decay"):
        return float(0.1 ** (step // 10))
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS)) if o.get("cosine") else 1.0


def train(run: Run, seed: int, out: Path) -> None:
    torch.manual_seed(seed)
    rng, o = torch.Generator().manual_seed(seed), run.o
    x, y, x_test, y_test = _spoil_data(o, run.data(seed), rng)
    model = run.network(o)
    _spoil_network(o, model)
    dtype = o.get("dtype", torch.float32)
    model = model.to(dtype)
    optimizer = _optimizer(run, model)
    if "stale" in o:
        model[-1] = nn.Linear(32, 10)  # type: ignore[operator]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(o, step))
    with gs.watch(model, probe=(x_test, y_test), out=out) as scope:
        scope.use(optimizer)
        for step in range(STEPS):
            _mode(o, model)
            chosen = _batch(o, step, len(x), rng)
            inputs = x[chosen] + o["noise"] * torch.randn(x[chosen].shape) if "noise" in o else x[chosen]
            if not o.get("keep"):
                optimizer.zero_grad()
            f = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
            loss = o.get("sign", 1.0) * loss_of(f, y[chosen], o)
            loss.backward()
            if "clip" in o:
                nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
            optimizer.step()
            schedule.step()
            scope.step(loss=loss)


def show(run: Run, seed: int, out: Path) -> str:
    """One line on what was said; returns the verdict."""
    found = gs.diagnose(out)
    kinds = [f.kind for f in found if not f.follows_from] + [f"({f.kind})" for f in found if f.follows_from]
    first = found[0].kind
    if run.healthy:
        verdict = "quiet" if found.healthy else "FALSE ALARM"
    elif not run.right:
        verdict = "no rule"
    else:
        named = {f.kind for f in found}
        verdict = "first" if first in run.right else "named" if named & set(run.right) else "MISSED"
    print(f"{verdict:12}{run.name} [{seed}]: {', '.join(kinds)}", flush=True)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="")
    parser.add_argument("--judge", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun, verdicts = time.process_time(), dict[str, int]()
    for place, run in enumerate(FAULTS + HEALTHY):
        for seed in given.seeds if given.only in run.name else ():
            out = given.out / f"{place}-{seed}"
            if not given.judge:
                train(run, seed, out)
            verdict = show(run, seed, out)
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
    print(verdicts, f"{time.process_time() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
