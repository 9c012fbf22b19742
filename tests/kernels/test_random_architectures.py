"""Networks nobody thought of: random stacks of blocks against one backward pass a scalar output.

The tolerance is ten times that of the zoo: chance composes norms after near-constant features now and
then, which amplifies rounding; a wrong rule is still off by more than 1e-3.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from references.jacobian import assert_kernel_close, assert_sites_close, reference_ntk

TOLERANCE = 1e-11
BUDGET = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


# --- blocks that keep (n, T, d)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + 0.5 * self.inner(x)


class Repeated(nn.Module):
    """One block, called several times."""

    def __init__(self, inner, times):
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


class Permuted(nn.Module):
    """The inner block sees the axes in another order, or folded."""

    def __init__(self, inner, order):
        super().__init__()
        self.inner, self.order = inner, order

    def forward(self, x):
        n, t, d = x.shape
        if self.order == "tokens first":
            return self.inner(x.transpose(0, 1)).transpose(0, 1)
        if self.order == "folded":
            return self.inner(x.reshape(n * t, d)).view(n, t, d)
        if self.order == "folded, tokens first":
            return self.inner(x.transpose(0, 1).reshape(t * n, d)).view(t, n, d).transpose(0, 1)
        if self.order == "channels first":
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        return self.inner(x)


class Gain(nn.Module):
    """Bare parameters, elementwise, over channels, tokens or both."""

    def __init__(self, *shape):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return x * self.gain + self.shift


class Product(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W = nn.Parameter(torch.randn(d, d) / d**0.5)

    def forward(self, x):
        return x @ self.W


class SelfAttention(nn.Module):
    def __init__(self, d, heads, need_weights):
        super().__init__()
        self.attend, self.need_weights = nn.MultiheadAttention(d, heads, batch_first=True), need_weights

    def forward(self, x):
        return self.attend(x, x, x, need_weights=self.need_weights)[0]


class FirstOf(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Gate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.mix = nn.Bilinear(d, d, d)

    def forward(self, x):
        return torch.tanh(self.mix(x, x.flip(-1)))


ACTIVATIONS = st.sampled_from([nn.Tanh, nn.ReLU, nn.GELU, lambda: nn.ReLU(inplace=True), nn.SiLU, nn.PReLU])


@st.composite
def block(draw, tokens, width):
    """A recipe (no arguments) for a module that keeps (n, tokens, width)."""
    kind = draw(
        st.sampled_from(
            [
                "linear",
                "mlp",
                "norm",
                "channel conv",
                "token mix",
                "gain",
                "product",
                "attention",
                "recurrent",
                "gate",
            ]
        )
    )
    bias = draw(st.booleans())
    if kind == "linear":
        activation = draw(ACTIVATIONS)
        order = draw(st.sampled_from(["plain", "tokens first", "folded", "folded, tokens first"]))
        recipe = lambda: Permuted(nn.Sequential(nn.Linear(width, width, bias=bias), activation()), order)  # noqa: E731
    elif kind == "mlp":
        hidden, activation = draw(st.integers(2, 6)), draw(ACTIVATIONS)
        recipe = lambda: nn.Sequential(nn.Linear(width, hidden, bias), activation(), nn.Linear(hidden, width))  # noqa: E731
    elif kind == "norm":
        which = draw(st.sampled_from(["layer", "rms", "both axes", "group", "batch"]))
        recipe = lambda: norm(which, tokens, width, bias)  # noqa: E731
    elif kind == "channel conv":
        kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        groups = draw(st.sampled_from([g for g in range(1, width + 1) if width % g == 0]))
        mode = draw(st.sampled_from(["zeros", "replicate"]))
        recipe = lambda: Permuted(  # noqa: E731
            nn.Conv1d(
                width,
                width,
                kernel,
                padding="same",
                dilation=dilation,
                groups=groups,
                bias=bias,
                padding_mode=mode,
            ),
            "channels first",
        )
    elif kind == "token mix":
        recipe = lambda: Permuted(nn.Linear(tokens, tokens, bias=bias), "channels first")  # noqa: E731
    elif kind == "gain":
        shape = draw(st.sampled_from([(width,), (tokens, 1), (tokens, width), (1,), ()]))
        recipe = lambda: Gain(*shape)  # noqa: E731
    elif kind == "product":
        recipe = lambda: Product(width)  # noqa: E731
    elif kind == "attention":
        heads = draw(st.sampled_from([h for h in (1, 2) if width % h == 0]))
        recipe = lambda: SelfAttention(width, heads, bias)  # noqa: E731
    elif kind == "recurrent":
        cell, layers = draw(st.sampled_from([nn.RNN, nn.GRU, nn.LSTM])), draw(st.integers(1, 2))
        recipe = lambda: FirstOf(cell(width, width, layers, bias=bias, batch_first=True))  # noqa: E731
    else:
        recipe = lambda: Gate(width)  # noqa: E731
    if draw(st.booleans()):
        inner = recipe
        recipe = lambda: Residual(inner())  # noqa: E731
    if draw(st.integers(0, 3)) == 0:
        once = recipe
        recipe = lambda: Repeated(once(), 2)  # noqa: E731
    return recipe


def norm(which, tokens, width, bias):
    if which == "layer":
        return nn.LayerNorm(width, bias=bias)
    if which == "rms":
        return nn.RMSNorm(width)
    if which == "both axes":
        return nn.LayerNorm((tokens, width))
    if which == "group":
        return Permuted(nn.GroupNorm(1, width), "channels first")
    return Permuted(nn.BatchNorm1d(width), "channels first")


class Net(nn.Module):
    def __init__(self, embed, blocks, head, pool):
        super().__init__()
        self.embed, self.blocks, self.head, self.pool = embed, nn.ModuleList(blocks), head, pool

    def forward(self, x):
        x = self.embed(x)
        for inner in self.blocks:
            x = inner(x)
        if self.pool == "mean":
            x = x.mean(1)
        elif self.pool == "last":
            x = x[:, -1]
        return self.head(x)


def moved(model):
    # Norms and gains start at one and zero, which hides a forgotten factor.
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


@st.composite
def token_nets(draw):
    """(model, x, x2): a random stack on (n, T, d); T = n is likely."""
    n, tokens, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([3, 4, 6]))
    recipes = draw(st.lists(block(tokens, width), min_size=1, max_size=4))
    by_ids, pool, outputs = (
        draw(st.booleans()),
        draw(st.sampled_from(["mean", "last", "none"])),
        draw(st.integers(1, 2)),
    )
    tied, seed, frozen = draw(st.booleans()), draw(st.integers(0, 999)), draw(st.integers(0, 3))
    repeated_block, n2 = draw(st.booleans()), draw(st.integers(1, 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [recipe() for recipe in recipes]
        if repeated_block:
            blocks.append(blocks[0])
        embed = nn.Embedding(4, width) if by_ids else nn.Linear(2, width)
        head = nn.Linear(width, 4 if by_ids and tied else outputs, bias=not tied)
        if by_ids and tied:
            head.weight = embed.weight
        model = moved(Net(embed, blocks, head, pool).double()).eval()
        for p in list(model.parameters())[1 : 1 + frozen]:
            p.requires_grad_(False)
        x, x2 = (
            torch.randint(4, (k, tokens)) if by_ids else torch.randn(k, tokens, 2, dtype=torch.float64) for k in (n, n2)
        )
    return model, x, x2


@st.composite
def image_nets(draw):
    """(model, x, x2): random convolutions, strides, paddings, groups, transposes, norms, skips."""
    n, seed, side = draw(st.integers(1, 3)), draw(st.integers(0, 999)), draw(st.integers(3, 5))
    layers, channels, size = [], 2, side
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(draw(st.integers(1, 3))):
            groups, wider = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4]))
            kernel, stride, padding = (
                draw(st.integers(1, min(3, size))),
                draw(st.integers(1, 2)),
                draw(st.integers(0, 1)),
            )
            bias = draw(st.booleans())
            if draw(st.integers(0, 2)) == 0 and size <= 4:
                padding = min(padding, (kernel - 1) // 2)
                extra = stride - 1 if draw(st.booleans()) else 0
                layers.append(nn.ConvTranspose2d(channels, wider, kernel, stride, padding, extra, groups, bias))
            else:
                mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"] if size > 1 else ["zeros"]))
                layers.append(
                    nn.Conv2d(channels, wider, kernel, stride, padding, groups=groups, bias=bias, padding_mode=mode)
                )
            channels = wider
            layers.append(draw(st.sampled_from([nn.ReLU(inplace=True), nn.Tanh(), nn.GELU()])))
            after = draw(st.sampled_from(["none", "batch", "group", "instance", "prelu"]))
            with torch.no_grad():
                size = nn.Sequential(*layers)(torch.zeros(1, 2, side, side)).shape[-1]
            if after == "batch":
                layers.append(nn.BatchNorm2d(channels))
            elif after == "group" and size > 1:
                layers.append(nn.GroupNorm(2, channels))
            elif after == "instance" and size > 1:
                layers.append(nn.InstanceNorm2d(channels, affine=True))
            elif after == "prelu":
                layers.append(nn.PReLU(channels))
        layers += [nn.Flatten(), nn.Linear(channels * size * size, 2)]
        model = moved(nn.Sequential(*layers).double()).eval()
        x, x2 = torch.randn(n, 2, side, side).double(), torch.randn(1, 2, side, side).double()
    return model, x, x2


def assert_all_kernels_right(model, x, x2):
    want = reference_ntk(model, x, by_site=True)
    if sum(k.norm() for k in want.values()) < 1e-6:
        return  # a dead net: there is no scale to compare with
    assert_sites_close(gs.ntk(model, x, by_site=True), want, TOLERANCE)
    trace = torch.einsum("acbc->ab", sum(want.values()))
    assert_kernel_close(gs.ntk(model, x, reduce="trace", memory=250_000), trace, TOLERANCE)
    cross = reference_ntk(model, x, x2)
    scale = torch.maximum(cross.norm(), sum(want.values()).norm())
    assert_kernel_close(gs.ntk(model, x, x2), cross, TOLERANCE, scale=scale)


@BUDGET
@given(net=token_nets())
def test_token_nets(net):
    assert_all_kernels_right(*net)


@BUDGET
@given(net=image_nets())
def test_image_nets(net):
    assert_all_kernels_right(*net)


def test_the_checker_raises_on_a_net_that_is_measured_wrongly(monkeypatch):
    def slightly_wrong(model, x, *args, by_site=False, **options):
        sites = {name: 1.001 * kernel for name, kernel in reference_ntk(model, x, by_site=True).items()}
        return sites if by_site else sum(sites.values())

    monkeypatch.setattr(gs, "ntk", slightly_wrong)
    x = torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="off by"):
        assert_all_kernels_right(nn.Linear(3, 2).double(), x, x)
