"""Sites that were sought once serve later passes of the same examples, and no others."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.capture.capturing import opened
from gramscope.capture.known_sites import KnownSites
from references.jacobian import assert_kernel_close, reference_ntk

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head, self.deep = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3), True

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.deep:
            h = h + torch.tanh(self.second(h)) * self.first.weight.sum(1)
        return self.head(h)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def kernel(network: nn.Module, x: torch.Tensor, known: KnownSites | None) -> torch.Tensor:
    with opened(network, x, known=known) as pass_:
        sites = pass_.snapshot(pass_.cotangents()).by_parameter()
        rows = [sum(site.whole_rows() for site in own) for own in sites.values() if own]
        return torch.einsum("nkp,mlp->nkml", *[torch.cat(rows, 2)] * 2)


@pytest.fixture
def searches(monkeypatch):
    from gramscope.capture.weight_sites import WeightSites

    made, real = [], WeightSites._find
    monkeypatch.setattr(WeightSites, "_find", lambda self: made.append(1) or real(self))
    return made


def test_later_passes_need_no_search_and_see_the_same(searches):
    network, known = model(), KnownSites()
    kernel(network, X, known)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(-1.3)
    searches.clear()
    found = kernel(network, X, known)
    assert searches == []
    assert torch.equal(found, kernel(network, X, None))


@pytest.mark.parametrize("change", ["fewer examples", "a frozen layer", "another graph"])
def test_another_pass_is_searched_again(searches, change):
    network, known, x = model(), KnownSites(), X
    kernel(network, X, known)
    searches.clear()
    if change == "fewer examples":
        x = X[:3]
    elif change == "a frozen layer":
        network.first.requires_grad_(False)
    else:
        network.deep = False
    found = kernel(network, x, known)
    assert searches == [1]
    assert torch.equal(found, kernel(network, x, None))


def test_a_signal_that_was_zero_is_not_remembered(searches):
    """It tells nothing of where examples lie, and may be other than zero later."""
    network, known = model(), KnownSites()
    nn.init.constant_(network.first.bias, -100.0)  # no unit of the first layer is on
    kernel(network, X, known)
    searches.clear()
    nn.init.zeros_(network.first.bias)
    found = kernel(network, X, known)
    assert searches == [1]
    assert torch.equal(found, kernel(network, X, None))


def test_what_the_values_of_data_may_move_is_not_remembered(searches):
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            chosen = x[:, 0] > self.a.bias[0]
            out = torch.zeros(len(x), 3, dtype=x.dtype)
            out = out.index_put((chosen.nonzero()[:, 0],), self.a(x[chosen]))
            return out.index_put(((~chosen).nonzero()[:, 0],), self.b(x[~chosen]))

    network, known = Routed().double(), KnownSites()
    kernel(network, X, known)
    searches.clear()
    kernel(network, X, known)
    assert searches == [1]


class LastTokens(nn.Module):
    """Tokens first, in one axis with the examples; each example has its output at the token of its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x, lengths):
        tokens = x.shape[1]
        h = self.second(torch.tanh(self.first(x.transpose(0, 1).reshape(-1, 4))))
        last = torch.arange(1, tokens + 1)[:, None] == lengths
        return self.head((h.view(tokens, -1, 5) * last[..., None]).sum(0))


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("tokens", [3, 4])
def test_zeros_that_leave_two_layouts_open(tokens, reduce):
    """Signals of the first three, of lengths one to three, fit examples first as well: others show that it is wrong."""
    torch.manual_seed(0)
    network = LastTokens().double()
    x = torch.randn(12, tokens, 4, dtype=torch.float64), torch.tensor([1, 2, 3, *[3, 1, 2] * 3])
    exact = reference_ntk(network, x, reduce=reduce)
    for memory in (40_000, 10**8):
        assert_kernel_close(gs.ntk(network, x, reduce=reduce, memory=memory), exact, 1e-12)


def test_outputs_of_one_token_need_no_second_search(searches):
    """Their signals fit two layouts, and all examples confirm the one that was found from a few."""

    class LastToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.mix(x.mT).mT) @ self.head.weight.T.mm(self.head.weight))[:, -1]

    torch.manual_seed(0)
    network, x = LastToken().double(), torch.randn(12, 7, 4, dtype=torch.float64)
    exact = reference_ntk(network, x)
    searches.clear()
    assert_kernel_close(gs.ntk(network, x, memory=10**8), exact, 1e-12)
    assert searches == [1]
