"""The diagnosis on networks and faults that benchmarks/diagnosis.py does not hold, by another than wrote the rules.

What counts as right was written down before the first run: ``right`` of each fault. Faults for which there is no rule
have none; what was said of them is printed all the same. Needs Fashion-MNIST, under $GRAMSCOPE_DATA or ../shared/data.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis_faults import Data, Options
from diagnosis_fifth_networks import dense
from diagnosis_loop import Base, Make, Run, by, makers
from diagnosis_networks import flat_digits, pictures
from gramscope.tasks import delayed_match


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


relu = partial(dense, act=nn.ReLU)
fashion, flat = (pictures("fashion-mnist", flat) for flat in (False, True))


def text(seed: int, o: Options) -> Data:
    """Words of three letters that follow one another at random: 12 letters, 20 words, next letter as the target."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 12, (20, 3), generator=rng)
    ids = words[torch.randint(0, 20, (832, 9), generator=rng)].flatten(1)[:, 1:26]
    return ids[:800, :-1], ids[:800, 1:], ids[800:, :-1], ids[800:, 1:]


def smooth(seed: int, o: Options) -> Data:
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(1700, 8, generator=rng), torch.randn(8, 3, generator=rng) / 8**0.5
    h = x @ w
    y = torch.sin(2 * h[:, :1]) + h[:, 1:2] * h[:, 2:3] + 0.05 * torch.randn(1700, 1, generator=rng)
    return x[:1500], y[:1500], x[1500:], y[1500:]


def two_classes(seed: int, o: Options) -> Data:
    x, y, *rest = smooth(seed, o)
    z = rest[1]
    return x, (y > 0.3).float(), rest[0], (z > 0.3).float()


def sequences(seed: int, o: Options) -> Data:
    a, b = delayed_match(500, seed=seed), delayed_match(64, seed=seed + 99)
    return a.x, a.y, b.x, b.y


def coordinates(seed: int, o: Options) -> Data:
    grid = torch.stack(torch.meshgrid(*2 * (torch.linspace(-1, 1, 28),), indexing="ij"), -1).reshape(-1, 2)
    pixels = fashion(seed, o)[0][3].reshape(-1, 1)
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
        self.each, self.all = relu(3, 64, 64)({}), relu(64, 64, 10)({})

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).mean(1))


def as_sets(seed: int, o: Options) -> Data:
    x, y, x_test, y_test = fashion(seed, o)
    grid = torch.stack(torch.meshgrid(*2 * (torch.linspace(-1, 1, 14),), indexing="ij"), -1).reshape(1, -1, 2)

    def points(image: Tensor) -> Tensor:
        pixels = F.avg_pool2d(image, 2).reshape(len(image), -1, 1)
        return torch.cat([pixels, grid.expand(len(image), -1, -1)], -1)

    return points(x), y, points(x_test), y_test


def autoencoded(seed: int, o: Options) -> Data:
    x, _, x_test, _ = flat(seed, o)
    return x, x, x_test, x_test


def several_labels(seed: int, o: Options) -> Data:
    """Five properties of a digit, each 0 or 1."""
    x, y, x_test, y_test = flat_digits(seed, o)
    rules = (lambda t: t % 2, lambda t: t > 4, lambda t: t % 3 == 0, lambda t: t < 2, lambda t: (t == 8) | (t == 9))
    return x, torch.stack([r(y) for r in rules], 1).float(), x_test, torch.stack([r(y_test) for r in rules], 1).float()


def sgd(lr: float = 0.05, momentum: float = 0.9, **more: Any) -> Make:
    return by(torch.optim.SGD, lr=lr, momentum=momentum, **more)


def adamw(lr: float = 2e-3, **more: Any) -> Make:
    return by(torch.optim.AdamW, lr=lr, **more)


def adam(lr: float = 2e-3, **more: Any) -> Make:
    return by(torch.optim.Adam, lr=lr, **more)


BASES = {
    "mixer": Base(fashion, mixer, adamw()),
    "resnet": Base(fashion, resnet, sgd()),
    "rnn": Base(fashion, Rows, adam()),
    "gpt": Base(text, GPT, adamw(3e-3, weight_decay=0.1)),
    "regression": Base(smooth, relu(8, 64, 64, 1), adam(3e-3)),
    "binary": Base(two_classes, relu(8, 32, 32, 1), sgd(0.05)),
}
broken, _ = makers(BASES)
ZERO = "rank_collapse frozen_layer vanishing_signals dead_units"
FAULTS = [
    broken("resnet", "loss summed over the batch", "lr_too_large", reduction="sum"),
    broken("binary", "loss summed over the batch", "lr_too_large", reduction="sum"),
    broken("mixer", "loss summed over the batch (AdamW: harmless)", "nothing_wrong", reduction="sum"),
    broken("mixer", "training labels shifted by one", "labels memorization", shift=1),
    broken("resnet", "training labels shifted by one", "labels memorization", shift=1),
    broken("gpt", "training targets one token too late", "labels memorization", shift=1),
    broken("mixer", "softmax before cross-entropy", "", twice=True),
    broken("resnet", "softmax before cross-entropy", "", twice=True),
    broken("binary", "sigmoid before the loss with logits", "", twice=True),
    broken("gpt", "AdamW at 0.1 without warm-up", "lr_too_large", adamw(0.1, weight_decay=0.1)),
    broken("rnn", "Adam at 0.1 without warm-up", "lr_too_large saturated_units", adam(0.1)),
    broken("resnet", "batch norm frozen in evaluation mode", "wrong_mode", frozen_norm=True),
    broken("resnet", "the whole network in evaluation mode", "wrong_mode", evaluation=0),
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
    broken("regression", "targets of 1,000 y + 5,000", "", targets=(1000.0, 5000.0)),
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
    return Run(Base(data, network, optimizer), name, (), o, healthy=True)


def _deep(o: Options) -> nn.Module:
    blocks = [Skip(nn.Sequential(nn.LayerNorm(32), _units(32, 64, nn.GELU, 0.0))) for _ in range(12)]
    return nn.Sequential(nn.Linear(196, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 10))


HEALTHY = [
    _healthy("mixer, AdamW", fashion, mixer, adamw()),
    _healthy("ResNet with batch norm, momentum, cosine schedule", fashion, resnet, sgd(), cosine=True),
    _healthy("tanh RNN over rows, gradients clipped to 1", fashion, Rows, adam(), clip=1.0),
    _healthy("GPT, AdamW 0.1, warm-up and cosine, clipped to 1", text, GPT, adamw(3e-3, weight_decay=0.1),
             clip=1.0, cosine=True),
    _healthy("regression, Adam", smooth, relu(8, 64, 64, 1), adam(3e-3)),
    _healthy("two classes, one output", two_classes, relu(8, 32, 32, 1), sgd(0.05)),
    _healthy("auto-encoder with a code of 16", autoencoded, relu(196, 64, 16, 64, 196), adam(2e-3)),
    _healthy("logistic regression, one layer", flat, lambda o: nn.Linear(196, 10), sgd(0.1)),
    _healthy("a frozen random body under a trained head", flat, relu(196, 256, 256, 10), adam(3e-3),
             frozen="body"),
    _healthy("Adagrad", flat, relu(196, 64, 64, 10), by(torch.optim.Adagrad, lr=0.02)),
    _healthy("RMSprop, wide (512)", flat, relu(196, 512, 10), by(torch.optim.RMSprop, lr=1e-3)),
    _healthy("sines of coordinates fit an image", coordinates, dense(2, 64, 64, 1, act=Sine), adam(2e-3)),
    _healthy("12 residual blocks with layer norm", flat, _deep, adamw(1e-3)),
    _healthy("five labels for each example", several_labels, relu(64, 48, 5), adam(3e-3)),
    _healthy("LSTM, delayed match, clipped to 1", sequences, lambda o: Last(*_sizes(sequences)), adam(5e-3), clip=1.0),
    _healthy("all examples in every batch", flat_digits, dense(64, 64, 10, act=nn.Tanh), sgd(0.3, 0.0), batch=1297),
    _healthy("labels smoothed by 0.1, noise in the inputs", flat, relu(196, 128, 10), adamw(1e-3),
             smoothing=0.1, noise=0.3),
    _healthy("dropout 0.5", flat, relu(196, 128, 128, 10), adam(1e-3), dropout=0.5),
    _healthy("a network of sets", as_sets, lambda o: Sets(), adam(3e-3)),
    _healthy("nine of ten examples of one class", two_classes, relu(8, 32, 1), adam(3e-3), rare=True),
]  # fmt: skip


def _sizes(data: Callable[[int, Options], Data]) -> tuple[int, int]:
    x, y, *_ = data(0, {})
    return x.shape[-1], y.shape[-1]
