"""The ninth set of the diagnosis: small networks of Hugging Face and other kinds that no set before has, held out.

``right`` of each fault was committed before any of these runs was judged. Needs transformers.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagnosis_faults import Data, Options, split
from diagnosis_fifth_networks import images
from diagnosis_loop import Base, Lion, by, makers
from gramscope.tasks import digits


# Data ----------------------------------------------------------------------------------------------------------------
def topics(seed: int, o: Options) -> Data:
    """Twelve of 48 words; four topics of eight words each, of which an example has three words more than by chance."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (1100,), generator=rng)
    x = torch.randint(0, 48, (1100, 12), generator=rng)
    place = torch.rand(x.shape, generator=rng).argsort(1) < 4
    x = torch.where(place, 8 * y[:, None] + x % 8, x)
    if o.get("other_ids"):  # the training examples went through another vocabulary than the probe
        x = torch.cat([x[:100], torch.randperm(48, generator=rng)[x[100:]]])
    return split(x, y, 100)


def chain(seed: int, o: Options) -> Data:
    """Symbols of 16 kinds, of which each depends on the two before, with a tenth of noise; the target is the next."""
    rng = torch.Generator().manual_seed(seed)
    rule = torch.randint(0, 16, (16, 4), generator=rng)
    ids = torch.randint(0, 16, (832, 16), generator=rng)
    for t in range(2, 16):
        follows = rule[ids[:, t - 1], ids[:, t - 2] % 4]
        ids[:, t] = torch.where(torch.rand(832, generator=rng) < 0.9, follows, ids[:, t])
    gap = 2 if o.get("shifted_twice") else 1  # the library shifts labels by itself, and the loop shifts them again
    x, y = ids[:, :14], ids[:, 1:15]
    return x[32:], ids[32:, gap : gap + 14], x[:32], y[:32]


def masked(seed: int, o: Options) -> Data:
    """The same symbols; a fifth of them is hidden, and only these have a target."""
    x, _, x_test, _ = chain(seed, {})
    rng, found = torch.Generator().manual_seed(seed), []
    for ids in (x, x_test):
        hidden = torch.rand(ids.shape, generator=rng) < 0.2
        found += [torch.where(hidden, 16, ids), torch.where(hidden, ids, -100)]
    return found[0], found[1], found[2], found[3]


def shapes(seed: int, o: Options) -> Data:
    """Images of 10 x 10 pixels under noise; the label of each pixel: ground, square or cross."""
    rng = torch.Generator().manual_seed(seed)
    x, y = 0.5 * torch.randn(700, 1, 10, 10, generator=rng), torch.zeros(700, 10, 10, dtype=torch.long)
    at = torch.randint(0, 7, (700, 4), generator=rng).tolist()
    for i, (a, b, c, d) in enumerate(at):
        y[i, a : a + 3, b : b + 3] = 1
        y[i, c + 1, d : d + 3], y[i, c : c + 3, d + 1] = 2, 2
    x = x + (y > 0)[:, None].float() * 1.5
    return split(x, y, 60)


def communities(seed: int, o: Options) -> Data:
    """Graphs of 15 nodes in three groups, more links inside; a third of the nodes tells its group; a label a node."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.rand(900, 15, generator=rng).argsort(1) % 3
    same = y[:, :, None] == y[:, None]
    draws = torch.rand(900, 15, 15, generator=rng)
    links = (torch.minimum(draws, draws.transpose(1, 2)) < torch.where(same, 0.45, 0.05)).float()
    told = (torch.rand(900, 15, 1, generator=rng) < 0.35).float()
    return split(torch.cat([told * F.one_hot(y, 3), links + torch.eye(15)], -1), y, 80)


def noised(seed: int, o: Options) -> Data:
    """Images at a random time of a diffusion, and the time; the target is the noise."""
    task, rng = digits(seed=seed), torch.Generator().manual_seed(seed)
    clean = torch.cat([task.x_test[:100], *3 * (task.x,)])
    time_, noise = torch.rand(len(clean), 1, generator=rng), torch.randn(clean.shape, generator=rng)
    angle = time_ * math.pi / 2
    x = torch.cos(angle) * clean + torch.sin(angle) * noise
    return split(torch.cat([x, 1000 * time_ if o.get("raw") else time_], 1), noise, 100)


def pieces(seed: int, o: Options) -> Data:
    """Which of four maps an input goes through depends on its first two entries."""
    rng = torch.Generator().manual_seed(seed)
    x, maps = torch.randn(1600, 8, generator=rng), torch.randn(4, 8, 2, generator=rng) / 8**0.5
    which = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return split(x, torch.einsum("nd,ndk->nk", x, maps[which]), 128)


def bandit(seed: int, o: Options) -> Data:
    """Contexts; y: an action taken at random and its reward less the mean: 1 for the best of five, else 0."""
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(1200, 10, generator=rng), torch.randn(10, 5, generator=torch.Generator().manual_seed(seed + 1))
    action = torch.randint(0, 5, (1200,), generator=rng)
    reward = ((torch.tanh(x) @ w).argmax(1) == action).float() - 0.2
    return split(x, torch.stack([action.float(), o.get("reward", 1.0) * reward], 1), 128)


def spirals(seed: int, o: Options) -> Data:
    """Points of the plane in two arms; there is no target, so the points stand in for it."""
    rng = torch.Generator().manual_seed(seed)
    r, arm = torch.rand(1500, 1, generator=rng) * 3 + 0.3, torch.randint(0, 2, (1500, 1), generator=rng)
    turn = 1.5 * r + math.pi * arm
    x = torch.cat([r * torch.cos(turn), r * torch.sin(turn)], 1) / 1.3 + 0.08 * torch.randn(1500, 2, generator=rng)
    x = x * o.get("units", 1.0)
    return split(x, x, 128)


def pulses(seed: int, o: Options) -> Data:
    """Noise over 30 steps with a pulse; the class is the third of the time in which it lies."""
    rng = torch.Generator().manual_seed(seed)
    x, place = 0.3 * torch.randn(1100, 30, 1, generator=rng), torch.randint(0, 30, (1100, 1), generator=rng)
    x.scatter_add_(1, place[..., None], torch.full((1100, 1, 1), 3.0))
    return split(x, place[:, 0] // 10, 100)


# Networks ------------------------------------------------------------------------------------------------------------
class Logits(nn.Module):
    """A network of transformers, of whose outputs the logits are taken."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def _sizes(o: Options) -> dict[str, Any]:
    return {"hidden_size": 32, "num_hidden_layers": o.get("depth", 2), "num_attention_heads": 4,
            "intermediate_size": 64, "hidden_dropout_prob": o.get("dropout", 0.1),
            "attention_probs_dropout_prob": o.get("dropout", 0.1),
            "initializer_range": o.get("spread", 0.05)}  # fmt: skip


def bert(o: Options) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=48, max_position_embeddings=16, num_labels=4, **_sizes(o))
    return Logits(BertForSequenceClassification(config))


def filler(o: Options) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Logits(BertForMaskedLM(BertConfig(vocab_size=17, max_position_embeddings=16, **_sizes(o))))


def vit(o: Options) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **_sizes({"dropout": 0.0} | o))
    return Logits(ViTForImageClassification(config))


def gpt2(o: Options) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {name: o.get("dropout", 0.0) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    config = GPT2Config(vocab_size=16, n_positions=16, n_embd=32, n_layer=o.get("depth", 2), n_head=4, use_cache=False,
                        initializer_range=o.get("spread", 0.05), **drop)  # fmt: skip
    return Logits(GPT2LMHeadModel(config))


def segmenter(o: Options) -> nn.Module:
    """Convolutions over pixels with group norm; classes come before the pixels."""
    act, layers = nn.Identity if o.get("linear") else nn.SiLU, list[nn.Module]()
    for a, b, gap in ((1, 16, 1), (16, 16, 2), (16, 16, 1)):
        layers += [nn.Conv2d(a, b, 3, padding=gap, dilation=gap), *([] if o.get("linear") else [nn.GroupNorm(4, b)]),
                   act(), nn.Dropout2d(o.get("dropout", 0.0))]  # fmt: skip
    return nn.Sequential(*layers, nn.Conv2d(16, 3, 1))


class Attention(nn.Module):
    """Nodes attend to their neighbours (as in graph attention networks); a label for each node."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        w, self.skip = 24, o.get("skip", True)
        self.first, self.head = nn.Linear(3, w), nn.Linear(w, 3)
        self.rounds = nn.ModuleList(nn.Linear(w, w) for _ in range(o.get("rounds", 2)))
        self.score = nn.ModuleList(nn.Linear(2 * w, 1) for _ in self.rounds)

    def forward(self, x: Tensor) -> Tensor:
        h, links = F.elu(self.first(x[..., :3])), x[..., 3:]
        for layer, score in zip(self.rounds, self.score, strict=True):
            n = h.shape[1]
            pairs = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)], -1)
            weights = score(pairs)[..., 0].masked_fill(links == 0, -1e9).softmax(-1)
            new = F.elu(layer(weights @ h))
            h = h + new if self.skip else new
        return self.head(h)


class Denoiser(nn.Module):
    """The noise in an image, from the image and sines of the time."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        w = o.get("width", 96)
        self.time, self.first, self.mid = nn.Linear(16, w), nn.Linear(64, w), nn.Linear(w, w)
        self.head, self.act = nn.Linear(w, 64), nn.Identity() if o.get("linear") else nn.SiLU()
        self.plain = bool(o.get("plain"))  # the time enters as it is

    def forward(self, x: Tensor) -> Tensor:
        x, time_ = x[:, :64], x[:, 64:]
        waves = time_ * 2.0 ** torch.arange(8.0, dtype=x.dtype)
        told = time_.expand(-1, 16) if self.plain else torch.cat([waves.sin(), waves.cos()], 1)
        return self.head(self.act(self.mid(self.act(self.first(x) + self.time(told)))))


class Routed(nn.Module):
    """Two of six experts for each input, by a router; ``aux`` is the loss that spreads the work."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 2)) for _ in range(6))
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        odds = self.router(x).softmax(-1)
        used = F.one_hot(odds.topk(2, -1).indices, 6).to(x.dtype).sum(1)
        self.aux = 6 * (odds.mean(0) * used.mean(0)).sum()
        return torch.stack([expert(x) for expert in self.experts], 1).mul((odds * used)[..., None]).sum(1)


class Flow(nn.Module):
    """Couplings of the two coordinates in turns (real NVP); outputs: the point in the latent space, and log |det|."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
            for _ in range(o.get("depth", 6))
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        logdet = torch.zeros_like(a)
        for part in self.parts:
            scale, shift = part(a[:, None]).unbind(1)
            scale = torch.tanh(scale)
            a, b, logdet = b * scale.exp() + shift, a, logdet + scale
        return torch.stack([a, b, logdet], 1)


class StateSpace(nn.Module):
    """A diagonal linear recurrence with gates around it, in two blocks; the class from the last state."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        w = 24
        self.first, self.head = nn.Linear(1, w), nn.Linear(w, 3)
        self.decay = nn.Parameter(torch.linspace(-1, 3, w).expand(2, w).clone())
        self.gate, self.out = (nn.ModuleList(nn.Linear(w, w) for _ in "ab") for _ in "cd")
        self.norm = nn.ModuleList(nn.LayerNorm(w) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for i in range(2):
            z, keep = self.norm[i](h), torch.sigmoid(self.decay[i])
            state, states = torch.zeros_like(z[:, 0]), []
            for t in range(z.shape[1]):
                state = keep * state + (1 - keep) * z[:, t]
                states.append(state)
            h = h + self.out[i](torch.stack(states, 1) * F.silu(self.gate[i](z)))
        return self.head(h[:, -1])


def actor(o: Options) -> nn.Module:
    act = o.get("act", nn.Tanh)
    return nn.Sequential(nn.Linear(10, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 5))


# Losses --------------------------------------------------------------------------------------------------------------
def policy(f: Tensor, y: Tensor) -> Tensor:
    """Policy gradient: the log-probability of the action taken, times its advantage."""
    return -(f.log_softmax(-1).gather(1, y[:, :1].long())[:, 0] * y[:, 1]).mean()


def likelihood(f: Tensor, y: Tensor) -> Tensor:
    return (0.5 * f[:, :2].square().sum(1) - f[:, 2]).mean()


class Player:
    """Takes actions by the network's own odds; the reward comes from the rule of the task, whose actions y holds."""

    def __init__(self) -> None:
        self.rule: Tensor | None = None

    def mixed(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.rule is None:
            self.rule = torch.randn(10, 5, generator=torch.Generator().manual_seed(torch.initial_seed() + 1))
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=model(x).float()).sample()
        reward = ((torch.tanh(x) @ self.rule).argmax(1) == action).float()
        return x, torch.stack([action.float(), y[:, 1].abs().max() / 0.8 * (reward - reward.mean())], 1)

    def learn(self, model: nn.Module) -> None:
        """Nothing: the rule stands."""


# Runs ----------------------------------------------------------------------------------------------------------------
HUGGING_FACE = ("bert", "filler", "vit", "gpt2")
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
Adafactor, RMSprop = torch.optim.Adafactor, torch.optim.RMSprop
GENTLE: Options = {"clip": 1.0, "cosine": True, "warmup": 20}
BASES = {
    "bert": Base(topics, bert, by(AdamW, lr=3e-3, weight_decay=0.01), {"steps": 200, "batch": 32, **GENTLE}),
    "filler": Base(masked, filler, by(AdamW, lr=3e-3), {"steps": 240, "batch": 48, "warmup": 20}),
    "vit": Base(images, vit, by(AdamW, lr=2e-3, weight_decay=0.05), {"steps": 200, "warmup": 20}),
    "gpt2": Base(chain, gpt2, by(AdamW, lr=4e-3, weight_decay=0.1), {"steps": 240, "batch": 32, **GENTLE}),
    "segmenter": Base(shapes, segmenter, by(Adam, lr=5e-3), {"steps": 150, "batch": 32}),
    "nodes": Base(communities, Attention, by(Adam, lr=5e-3), {"steps": 200, "batch": 32}),
    "denoiser": Base(noised, Denoiser, by(Adam, lr=2e-3), {"batch": 128}),
    "routed": Base(pieces, Routed, by(Adam, lr=5e-3), {"extra": 0.01}),
    "actor": Base(bandit, actor, by(Adam, lr=5e-3), {"opponent": Player, "batch": 128}, policy),
    "flow": Base(spirals, Flow, by(Adam, lr=3e-3), {"batch": 128}, likelihood),
    "space": Base(pulses, StateSpace, by(AdamW, lr=5e-3, weight_decay=0.01), {"steps": 200}),
}
broken, sound = makers(BASES)
LOST, DEEP = "labels memorization", "vanishing_signals rank_collapse oversmoothing saturated_units"
FAULTS = [
    broken("bert", "AdamW at 0.3 without warm-up", "lr_too_large", by(AdamW, lr=0.3), warmup=1, clip=1e9),
    broken("bert", "AdamW at 1e-7", "lr_too_small", by(AdamW, lr=1e-7)),
    broken("bert", "dropout 0.9", "dropout_too_strong", dropout=0.9),
    broken("bert", "in evaluation mode", "wrong_mode", evaluation=0),
    broken("bert", "training labels shuffled", LOST, shuffle=1.0),
    broken("bert", "another vocabulary for the training examples", LOST, other_ids=True),
    broken("bert", "48 training examples", "memorization", train_examples=48, dropout=0.0, cosine=False),
    broken("bert", "the embeddings frozen", "frozen_layer", frozen="net.bert.embeddings"),
    broken("bert", "the classifier not in the optimiser", "not_in_optimizer", left="net.classifier"),
    broken("bert", "examples sorted by class", "classes_in_order", by(Adam, lr=2e-3), sorted=True, cosine=False),
    broken("filler", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("filler", "weights in bfloat16, SGD at 1e-3", "half_precision", by(SGD, lr=1e-3), dtype=torch.bfloat16),
    broken("filler", "weight decay 100", "weight_decay_too_strong", by(AdamW, lr=3e-3, weight_decay=100.0)),
    broken("filler", "all training targets shuffled", LOST, shuffle=1.0),
    broken("vit", "AdamW at 1", "lr_too_large", by(AdamW, lr=1.0)),
    broken("vit", "pixels from 0 to 255", "inputs_not_normalized", pixels=255.0),
    broken("vit", "no training example of class 4", "class_missing", without=4),
    broken("vit", "60 % of the training labels shuffled", "labels", shuffle=0.6),
    broken("vit", "softmax before cross-entropy", "softmax_twice", twice=True),
    broken("vit", "weights of deviation 2", "exploding_signals saturated_units", spread=2.0),
    broken("vit", "a cosine that ends after 10 steps", "lr_too_small", cosine=10),
    broken("vit", "batches of one", "batch_too_small", batch=1),
    broken("gpt2", "labels shifted twice", LOST, shifted_twice=True),
    broken("gpt2", "eight attentions, weights of deviation 1", "exploding_signals", depth=8, spread=1.0),
    broken("gpt2", "the same batch always", "memorization", same=True, cosine=False),
    broken("gpt2", "Adafactor at 1e-6", "lr_too_small", by(Adafactor, lr=1e-6)),
    broken("gpt2", "blocks 100,000 times slower than the rest", "head_only lr_too_small", body=1e-5,
           slow="net.transformer.h"),
    broken("segmenter", "no activation", "no_activation", linear=True),
    broken("segmenter", "SGD, loss summed over pixels", "lr_too_large", by(SGD, lr=0.05, momentum=0.9),
           reduction="sum"),
    broken("segmenter", "every 30th batch 100 times too large", "loss_spikes", spikes=30),
    broken("segmenter", "NaN in one example", "not_a_number", nan=True),
    broken("segmenter", "momentum 0.999", "momentum_too_large", by(SGD, lr=0.05, momentum=0.999)),
    broken("nodes", "ten rounds without skips", DEEP, rounds=10, skip=False),
    broken("nodes", "training labels shuffled", LOST, shuffle=1.0),
    broken("nodes", "batches of one", "batch_too_small", batch=1),
    broken("nodes", "SGD, gradients clipped to 1e-4", "clipping_always", by(SGD, lr=0.1, momentum=0.9), clip=1e-4),
    broken("nodes", "the first layer frozen", "frozen_layer", frozen="first"),
    broken("denoiser", "the time from 0 to 1,000 as it is", "inputs_not_normalized", raw=True, plain=True),
    broken("denoiser", "noise of another image as the target", LOST, shuffle=1.0),
    broken("denoiser", "no activation", "no_activation", linear=True),
    broken("denoiser", "SGD at 1e-6", "lr_too_small", by(SGD, lr=1e-6)),
    broken("denoiser", "weights in bfloat16, Adam at 2e-5", "half_precision lr_too_small", by(Adam, lr=2e-5),
           dtype=torch.bfloat16),
    broken("routed", "targets of 1,000 y + 5,000", "targets_not_normalized", targets=(1000.0, 5000.0)),
    broken("routed", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("routed", "equal weights in every unit", "rank_collapse", constant=True),
    broken("routed", "an expert not in the optimiser", "not_in_optimizer", left="experts.2"),
    broken("routed", "a third of the probe twice", "doubled_examples", copies=3),
    broken("actor", "Adam at 3", "lr_too_large saturated_units", by(Adam, lr=3.0)),
    broken("actor", "rewards of 1,000, SGD", "lr_too_large", by(SGD, lr=0.1), reward=1000.0),
    broken("actor", "Adam at 1e-7", "lr_too_small", by(Adam, lr=1e-7)),
    broken("actor", "weights 30 times too large", "saturated_units exploding_signals", scale=30.0),
    broken("flow", "Adam at 1", "lr_too_large", by(Adam, lr=1.0)),
    broken("flow", "points in units 1,000 times smaller", "inputs_not_normalized", units=1000.0),
    broken("flow", "biases of -8", "dead_units", bias=-8.0),
    broken("space", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("space", "all linear layers zero", "rank_collapse frozen_layer vanishing_signals", zero="all"),
    broken("space", "a probe of one class", "constant_probe", one=True),
    broken("space", "weight decay 50", "weight_decay_too_strong", by(AdamW, lr=5e-3, weight_decay=50.0)),
    broken("space", "24 training examples", "memorization", train_examples=24),
]  # fmt: skip

HEALTHY = [
    sound("bert"), sound("bert", "Adam, no clipping", by(Adam, lr=2e-3), clip=1e9),
    sound("bert", "Lion", by(Lion, lr=1e-3, weight_decay=0.1)), sound("bert", "bfloat16 autocast", autocast=True),
    sound("bert", "four batches of 8 accumulated", batch=8, accumulate=4), sound("bert", "three layers", depth=3),
    sound("bert", "smoothed labels", smoothing=0.1),
    sound("filler"), sound("filler", "Adafactor", by(Adafactor, lr=0.02)), sound("filler", "Lion", by(Lion, lr=1e-3)),
    sound("filler", "autocast, cosine", autocast=True, cosine=True), sound("filler", "batches of 16", batch=16),
    sound("vit"), sound("vit", "dropout 0.1, cosine", dropout=0.1, cosine=True),
    sound("vit", "Adafactor", by(Adafactor, lr=0.02)),
    sound("vit", "NAdam, clipped to 1", by(torch.optim.NAdam, lr=2e-3), clip=1.0),
    sound("vit", "mixed-up examples", mixup=True), sound("vit", "Lion", by(Lion, lr=5e-4)),
    sound("vit", "goes on from a trained network", by(AdamW, lr=5e-4), pretrained=150),
    sound("gpt2"), sound("gpt2", "Adam, no schedule", by(Adam, lr=3e-3), cosine=False, clip=1e9),
    sound("gpt2", "Lion", by(Lion, lr=1e-3)), sound("gpt2", "dropout 0.1", dropout=0.1),
    sound("gpt2", "Adafactor", by(Adafactor, lr=0.03)), sound("gpt2", "two batches of 16", batch=16, accumulate=2),
    sound("gpt2", "bfloat16 autocast", autocast=True), sound("gpt2", "four blocks", depth=4),
    sound("segmenter"), sound("segmenter", "momentum", by(SGD, lr=0.1, momentum=0.9)),
    sound("segmenter", "dropout of channels", dropout=0.2), sound("segmenter", "noise in the inputs", noise=0.3),
    sound("segmenter", "AdamW, cosine", by(AdamW, lr=5e-3), cosine=True), sound("segmenter", "batches of 8", batch=8),
    sound("nodes"), sound("nodes", "four rounds", rounds=4), sound("nodes", "momentum", by(SGD, lr=0.1, momentum=0.9)),
    sound("nodes", "RMSprop, clipped to 1", by(RMSprop, lr=2e-3), clip=1.0), sound("nodes", "Lion", by(Lion, lr=1e-3)),
    sound("denoiser"), sound("denoiser", "AdamW, cosine", by(AdamW, lr=3e-3), cosine=True),
    sound("denoiser", "wide, SGD", by(SGD, lr=0.2, momentum=0.9), width=192),
    sound("denoiser", "batches of 16", batch=16), sound("denoiser", "bfloat16 autocast", autocast=True),
    sound("denoiser", "Adafactor", by(Adafactor, lr=0.02)),
    sound("routed"), sound("routed", "momentum", by(SGD, lr=0.1, momentum=0.9)),
    sound("routed", "a larger loss for the router", extra=0.3), sound("routed", "Lion", by(Lion, lr=1e-3)),
    sound("routed", "RMSprop, cosine", by(RMSprop, lr=2e-3), cosine=True),
    sound("actor"), sound("actor", "SGD", by(SGD, lr=0.5)), sound("actor", "ReLU, RMSprop", by(RMSprop, lr=2e-3),
                                                                  act=nn.ReLU),
    sound("actor", "batches of 32", batch=32), sound("actor", "AdamW, cosine", by(AdamW, lr=5e-3), cosine=True),
    sound("flow"), sound("flow", "ten couplings", depth=10), sound("flow", "AdamW, clipped to 1", by(AdamW, lr=3e-3),
                                                                   clip=1.0),
    sound("flow", "batches of 32", batch=32), sound("flow", "RMSprop", by(RMSprop, lr=1e-3)),
    sound("space"), sound("space", "Adam, clipped to 1", by(Adam, lr=5e-3), clip=1.0),
    sound("space", "Lion", by(Lion, lr=5e-4)), sound("space", "momentum, cosine", by(SGD, lr=0.2, momentum=0.9),
                                                     cosine=True),
    sound("space", "two batches of 32", batch=32, accumulate=2), sound("space", "smoothed labels", smoothing=0.1),
]  # fmt: skip
