"""Signals whose channels lie last, and those of steps that pass over an image: kernels do not depend on it."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.capture import channels
from gramscope.capture.channels import after_convolution, channels_last, for_convolution, like
from gramscope.capture.tape import Draft, Signal
from gramscope.kernels import memory
from gramscope.kernels.ntk import contracted
from in_parts import snapshot_in_parts
from references.jacobian import assert_kernel_close, assert_sites_close, reference_ntk

CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Strided(nn.Module):
    """A residual block whose shortcut steps over the image, as those of ResNets do."""

    def __init__(self, way, *, rank=2, stride=2, groups=1, bias=True):
        super().__init__()
        torch.manual_seed(0)
        conv = CONVOLUTION[rank]
        self.way, self.rank = way, rank
        self.first = conv(2, 4, 3, padding=1, bias=bias)
        self.branch = conv(4, 6, 3, padding=1, stride=stride, groups=groups, bias=bias)
        self.shortcut = conv(4, 6, 1, stride=stride, groups=groups, bias=bias)
        self.other = conv(4, 6, 1, stride=stride, bias=bias)
        self.last, self.head = conv(6, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x):
        seen = torch.tanh(self.last(torch.tanh(self.way(self, torch.sin(self.first(x))))))
        return self.head(seen.flatten(2).mean(2))


WAYS = {
    "both": lambda net, x: net.branch(x) + net.shortcut(x),
    "shortcut first": lambda net, x: net.shortcut(x) + net.branch(x),
    "shortcut alone": lambda net, x: net.shortcut(x),
    "two shortcuts": lambda net, x: net.shortcut(x) + net.other(x),
    "two and the branch": lambda net, x: net.shortcut(x) + net.branch(x) + net.other(x),
    "behind an activation": lambda net, x: net.shortcut(torch.relu(x)) + net.branch(x),
    "input read once more": lambda net, x: net.shortcut(x) + net.branch(x) + x.flatten(2).mean((1, 2)).reshape(
        len(x), *[1] * (x.dim() - 1)
    ),
}  # fmt: skip


@pytest.fixture(params=["last", "planar again", "never"])
def order(request, monkeypatch):
    """Channels last for float64 too, kept so or not, so that the reference's digits can be asked for."""
    monkeypatch.setattr(channels, "FAST", set() if request.param == "never" else {torch.float32, torch.float64})
    monkeypatch.setattr(channels, "THICK", 1 if request.param == "planar again" else 32)


def image(rank, n=5, size=7, dtype=torch.float64):
    return torch.randn(n, 2, *([size] * rank), dtype=dtype, generator=torch.Generator().manual_seed(1))


def check(model, x, tolerance=1e-12):
    for trace, reduce in ((False, "none"), (True, "trace")):
        snapshot = snapshot_in_parts(model, x, len(x), 2, trace=trace)
        kernels = contracted(snapshot, trace=trace, by_site=True)
        assert_sites_close(kernels, reference_ntk(model, x, reduce=reduce, by_site=True), tolerance)


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_ways_through_a_strided_block(way, stride, order):
    check(Strided(WAYS[way], stride=stride).double(), image(2))


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_other_ranks_and_groups(rank, groups, order):
    check(Strided(WAYS["both"], rank=rank, groups=groups).double(), image(rank, size=5))


def test_uneven_steps(order):
    model = Strided(WAYS["both"]).double()
    model.branch = nn.Conv2d(4, 6, 3, padding=1, stride=(1, 2)).double()
    model.shortcut = nn.Conv2d(4, 6, 1, stride=(1, 2)).double()
    check(model, image(2))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_float32_and_a_model_with_channels_last(memory_format):
    model = Strided(WAYS["both"]).to(memory_format=memory_format)
    x = image(2, size=12, dtype=torch.float32).to(memory_format=memory_format)
    check(model, x, 1e-5)


def test_ntk_takes_this_way(monkeypatch):
    """The default of a CPU: signals of the strided convolution come with channels last, the narrow first layer too."""
    seen = []
    monkeypatch.setattr(memory, "PART", 2**12)
    monkeypatch.setattr(
        "gramscope.capture.rowwise.after_convolution",
        lambda images: seen.append((channels_last(images), images.shape[1])) or after_convolution(images),
    )
    model, x = Strided(WAYS["both"]), image(2, size=12, dtype=torch.float32)
    kernel = gs.ntk(model, x)
    assert (True, 4) in seen
    assert (False, 6) in seen
    assert_kernel_close(kernel, reference_ntk(model, x), 1e-5)


def test_orders_of_memory():
    planar = torch.randn(3, 4, 5, 6)
    last = for_convolution(planar, (2, 2))
    assert channels_last(last)
    assert not channels_last(planar)
    torch.testing.assert_close(last, planar, rtol=0, atol=0)
    assert for_convolution(planar, (1, 1)) is planar
    assert for_convolution(planar.double(), (2, 2)).is_contiguous()
    assert channels_last(after_convolution(last))
    assert after_convolution(torch.randn(2, 40, 3, 3).to(memory_format=torch.channels_last)).is_contiguous()
    factor = torch.randn(1, 4, 5, 6)
    assert channels_last(like(factor, last))
    assert like(factor, planar) is factor
    assert not channels_last(torch.randn(3, 4, 5))


def test_signals_of_some_places_are_added_to_all():
    """Sums of signals, of all places or some, spare or not, with slopes yet to be applied; nothing else is written."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 5)
    places = (..., slice(None, None, 2), slice(None, None, 3))
    draft = Draft((x,), lambda signal, part: (signal,), places=places)

    def whole(signal):
        return signal.settled().values

    for first in range(6):
        for second in range(6):
            some = torch.randn(3, 4, 2, 3, 2)
            kept, spare, scaled = (torch.randn(3, 4, 2, 6, 5) for _ in range(3))
            slope = torch.randn(3, 1, 2, 6, 5)

            def build(kind, some=some, kept=kept, spare=spare, scaled=scaled, slope=slope):
                return (
                    Signal(some.clone(), True, sparse=draft),
                    Signal(kept),
                    Signal(spare.clone(), True),
                    Signal(scaled).scaled(slope, False),
                    Signal(scaled.clone(), True).scaled(slope, False).scaled(slope, False),
                    Signal(some.clone(), True, sparse=draft).scaled(slope, False),
                )[kind]

            before = kept.clone(), scaled.clone()
            expected = whole(build(first)) + whole(build(second))
            torch.testing.assert_close(whole(build(first) + build(second)), expected, rtol=0, atol=1e-6)
            assert torch.equal(kept, before[0])
            assert torch.equal(scaled, before[1])
