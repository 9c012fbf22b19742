"""Gradient rows and the pieces made of them, in every order of memory that they come in."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base import arithmetic
from gramscope.capture import OuterSite
from gramscope.kernels import accumulate
from gramscope.kernels.accumulate import Accumulator
from gramscope.kernels.contractions import add_in_parts
from references.jacobian import assert_kernel_close, reference_ntk


@pytest.mark.parametrize("x2", [None, 3])
def test_narrow_rows_of_many_layers(x2):
    """Small convolutions have rows as narrow as those of gains, in memory that the next layer's rows take over."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(50, 2)).double().eval()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    others = None if x2 is None else torch.randn(x2, 2, 5, 5, dtype=torch.float64)
    for reduce in ("none", "trace"):
        assert_kernel_close(gs.ntk(model, x, others, reduce=reduce), reference_ntk(model, x, others, reduce), 1e-12)


@pytest.mark.parametrize("positions_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fan_in", [1, 9, 16, 27, 32, 40])
def test_products_in_every_order_of_memory(fan_in, groups, dtype, positions_first):
    torch.manual_seed(0)
    n, k, T, o = 3, 2, 7, 5
    inputs = torch.randn(n, T, groups, fan_in, dtype=dtype)
    signals = torch.randn(n, k, T, groups, o, dtype=dtype)
    if not positions_first:
        signals = signals.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    site = OuterSite("w", "linear", None, inputs.__getitem__, signals, fan_in, (groups, o, fan_in), (0, 1, 2))
    expected = torch.einsum("nkTgo,nTgi->nkgoi", signals.double(), inputs.double()).flatten(2)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(site.rows().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduce", ["none", "trace"])
def test_kernels_by_the_products_of_onednn(monkeypatch, reduce):
    """Convolutions have their positions innermost, linear layers outermost."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 40, 3), nn.Tanh(), nn.Conv2d(40, 30, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Flatten(2), nn.Linear(16, 5), nn.Tanh(), nn.Flatten(), nn.Linear(150, 3))
    x = torch.randn(3, 2, 6, 6)
    exact = reference_ntk(model.double(), x.double(), reduce=reduce)
    model.float()
    multiply, shapes = torch.ops.mkldnn._linear_pointwise, set()
    monkeypatch.setattr(arithmetic, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(arithmetic, "WORTH", 0)
    monkeypatch.setattr(
        torch.ops.mkldnn,
        "_linear_pointwise",
        lambda left, right, *rest: shapes.add((len(left), *right.shape)) or multiply(left, right, *rest),
    )
    found = gs.ntk(model, x, reduce=reduce)
    assert float((found - exact).norm() / exact.norm()) < 2e-6
    assert shapes >= {(120, 18, 16), (15, 16, 30)}  # rows of the first convolution and of a linear layer


class LastPositions(nn.Module):
    """Two layers along five positions, of which the outputs read some: others in each example if ``apart``."""

    def __init__(self, read: tuple[int, ...], apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6))
        self.mask = torch.zeros(4, 5, 1)
        for example in range(4):
            self.mask[example, [(place + example * apart) % 5 for place in read]] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask[: len(x)].to(x)
        return (self.layers(x) * mask).sum(1)[:, :2] + 0.1 * (self.layers(x) * mask).square().sum(1)[:, 2:4]


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize(("read", "apart", "contracted"), [((4,), False, 1), ((1, 3), False, 2), ((2,), True, 4)])
def test_positions_without_signals_are_left_out(monkeypatch, reduce, read, apart, contracted):
    """They add nothing, and cost nothing: products see the positions that some example's outputs read."""
    seen = []
    outer = Accumulator._outer_rows

    def noted(self, left, right):  # type: ignore[no-untyped-def]
        seen.append(left.positions)
        return outer(self, left, right)

    monkeypatch.setattr(Accumulator, "_outer_rows", noted)
    monkeypatch.setattr(accumulate, "cheapest", lambda *_: "rows")
    model, x = LastPositions(read, apart).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    found = gs.ntk(model, x, reduce=reduce, coupled="exact")
    assert set(seen) == {2 * contracted}  # the layers are called twice
    assert_kernel_close(found, reference_ntk(model, x, None, reduce), 1e-12)
    whole = gs.capture(model, x, coupled="exact").by_parameter()["layers.0.weight"]
    assert {site.positions for site in whole} == {5}


@pytest.mark.parametrize(("size", "at_once"), [(4, 1), (4, 3), (5, 100), (64, 2), (100, 1)])
@pytest.mark.parametrize("length", [1, 4, 63, 64, 200])
def test_long_sums_in_parts(length, size, at_once):
    """Batched parts and what is left over, at any length, as a GPU adds them."""
    torch.manual_seed(0)
    left, right = torch.randn(3, length, dtype=torch.float64), torch.randn(6, length, dtype=torch.float64)[::2]
    out = torch.randn(3, 3, dtype=torch.float64)
    expected = out + left @ right.T
    add_in_parts(out, left, right, size, at_once)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-12)  # 200 terms of size 1 in another order
