"""Gradient rows and the pieces made of them, in every order of memory that they come in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.capture import OuterSite
from gramscope.kernels import accumulate
from gramscope.kernels.pieces import RowPiece, joined
from references.jacobian import assert_kernel_close, reference_ntk


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 4), m=st.integers(1, 4), k=st.integers(1, 3), symmetric=st.booleans(), trace=st.booleans(),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 100),
)  # fmt: skip
def test_joined_pieces_are_their_sum(n, m, k, symmetric, trace, widths, seed):
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for width in widths:
        left = torch.randn(n, k, width, dtype=torch.float64, generator=generator)
        right = left if symmetric else torch.randn(m, k, width, dtype=torch.float64, generator=generator)
        pieces.append(RowPiece(left, right, trace))
    rows, cols = (0, n), (0, n if symmetric else m)
    c = 1 if trace else k
    apart, together = (torch.zeros(n * c, cols[1] * c, dtype=torch.float64) for _ in range(2))
    for piece in pieces:
        piece.add(apart, rows, cols)
    joined(pieces).add(together, rows, cols)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("x2", [None, 3])
def test_narrow_rows_of_many_layers(x2, monkeypatch):
    """Small convolutions have rows as narrow as those of gains, in memory that the next layer's rows take over."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(50, 2)).double().eval()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    others = None if x2 is None else torch.randn(x2, 2, 5, 5, dtype=torch.float64)
    found = []
    monkeypatch.setattr(accumulate, "joined", lambda pieces: found.append(len(pieces)) or joined(pieces))
    for reduce in ("none", "trace"):
        assert_kernel_close(gs.ntk(model, x, others, reduce=reduce), reference_ntk(model, x, others, reduce), 1e-12)
    assert min(found) > 1  # gains and offsets were joined


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
