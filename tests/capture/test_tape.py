"""The tape: it claims only networks that treat each example by itself, and gives what autograd gives."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from cases import CASES, COUPLED
from gramscope.base.errors import CoupledExamplesError
from gramscope.capture.capture import captured_by_example
from gramscope.capture.tape import Tape

WIDTH, N = 4, 4  # as many examples as features, so that a shape alone tells nothing


def by_example(model, x, **options):
    with captured_by_example(model, x, **options) as some:
        return some.apart


class Program(nn.Module):
    """A linear layer, some operations on (n, 2, 4), a linear layer."""

    def __init__(self, operations):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(2 * WIDTH).eval()
        self.register_buffer("table", torch.randn(N, WIDTH))
        self.operations = operations
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        self.made = self.first(x)
        h = self.made.unflatten(1, (2, WIDTH))
        for operation in self.operations:
            h = operation(self, h)
        return self.last(h)[:, 0] - 2.0 * self.last(h)[:, 1]


class Mixing(torch.autograd.Function):
    """The recorder sees no call of a user's own function."""

    @staticmethod
    def forward(ctx, h):
        return h.roll(1, 0)

    @staticmethod
    def backward(ctx, *gradient):
        return gradient[0].roll(-1, 0)


APART = {
    "relu": lambda m, h: h.relu(),
    "relu in place": lambda m, h: h.clone().relu_(),
    "gelu": lambda m, h: F.gelu(h, approximate="tanh"),
    "softplus": lambda m, h: F.softplus(h, beta=2.0),
    "linear": lambda m, h: F.linear(h, m.weight),
    "matmul": lambda m, h: h @ m.weight,
    "gain": lambda m, h: h * m.gain,
    "offset": lambda m, h: m.gain + h,
    "offset in place": lambda m, h: h.clone().add_(m.gain),
    "constant": lambda m, h: 2.0 * h - 0.5,
    "residual": lambda m, h: h + torch.tanh(h @ m.weight),
    "residual in place": lambda m, h: (h @ m.weight).add_(h),
    "product": lambda m, h: h * torch.sigmoid(h @ m.weight),
    "quotient": lambda m, h: h / (2.0 + h.square()),
    "table for each token": lambda m, h: h + m.table[:2],
    "softmax over tokens": lambda m, h: h.softmax(1),
    "layer norm": lambda m, h: F.layer_norm(h, (WIDTH,), m.gain),
    "layer norm of all": lambda m, h: F.layer_norm(h, (2, WIDTH)),
    "attention": lambda m, h: F.scaled_dot_product_attention(h @ m.weight, h, h),
    "products of tokens": lambda m, h: (h @ h.transpose(1, 2)) @ h,
    "turned": lambda m, h: h.transpose(1, 2).reshape(N, 2, WIDTH),
    "permuted": lambda m, h: h.permute(0, 2, 1).reshape(N, 2, WIDTH),
    "halves": lambda m, h: torch.cat([part.sin() for part in h.chunk(2, dim=-1)], dim=-1),
    "flipped halves": lambda m, h: torch.cat(h.split(2, dim=2)[::-1], dim=2),
    "batch norm of vectors": lambda m, h: 2.0 * torch.tanh(m.norm(h.flatten(1)).unflatten(1, (2, WIDTH))),
    "difference beside a branch": lambda m, h: (torch.sin(h) - h) + F.relu(torch.cos(h)),
    "difference of branches": lambda m, h: F.relu(h @ m.weight) - F.relu(h) + F.relu(h * 0.5),
    "sum of tokens beside": lambda m, h: F.relu(h.sum(1, keepdim=True)) + F.relu(h),
    "first token": lambda m, h: h[:, :1] + h,
    "some features": lambda m, h: h[:, :, [1, 0, 3, 3]],
    "mean of tokens": lambda m, h: h - h.mean(1, keepdim=True),
    "flat": lambda m, h: h.flatten(1).view(N, 2, -1),
    "convolution": lambda m, h: F.conv1d(h, m.weight.reshape(2, 2, 4)[:, :, :3], padding=1),
    "uneven convolution": lambda m, h: F.conv1d(F.pad(h, (2, 1)), m.weight.reshape(2, 2, 4)),
    "transposed convolution": lambda m, h: F.conv_transpose1d(h, m.weight.reshape(2, 2, 4)[:, :, :3], padding=1),
    "largest nearby": lambda m, h: F.max_pool1d(h, 3, 1, 1),
    "mean nearby": lambda m, h: F.avg_pool1d(h, 3, 1, 1),
    "no dropout": lambda m, h: F.dropout(h, 0.5, training=False),
    "padded": lambda m, h: F.pad(h, (1, 0))[:, :, :-1],
    "fixed batch norm": lambda m, h: F.batch_norm(h, m.table[0, :2], m.table[1, :2].square()),
}  # fmt: skip
TOGETHER = {
    "mean": lambda m, h: h - h.mean(0),
    "mean kept": lambda m, h: h - h.mean(0, keepdim=True),
    "mean of everything": lambda m, h: h * h.mean(),
    "softmax over examples": lambda m, h: h.softmax(0),
    "softmax over examples, counted from the end": lambda m, h: F.softmax(h, dim=-3),
    "rolled": lambda m, h: h.roll(1, 0),
    "flipped": lambda m, h: h.flip(0),
    "permuted examples": lambda m, h: h[[1, 0, 3, 2]],
    "backwards": lambda m, h: h[torch.arange(N - 1, -1, -1)],
    "matrix product of examples": lambda m, h: (h[:, 0] @ h[:, 1]).unsqueeze(1) + h,
    "turned examples": lambda m, h: h.permute(2, 1, 0),
    "transposed examples": lambda m, h: h.transpose(0, 2),
    "reshaped turn": lambda m, h: h.permute(2, 0, 1).reshape(N, 2, WIDTH),
    "running sum": lambda m, h: h.cumsum(0),
    "sorted": lambda m, h: h.sort(0).values,
    "batch norm": lambda m, h: F.batch_norm(h, None, None, training=True),
    "normalised": lambda m, h: F.normalize(h, dim=0),
    "attention over examples": lambda m, h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "custom function": lambda m, h: Mixing.apply(h),
    "in place": lambda m, h: h.clone().sub_(h.mean(0)),
    "written": lambda m, h: _swapped(h.clone()),
    "a view written": lambda m, h: _view_written(h.clone()),
    "einsum": lambda m, h: torch.einsum("mnq,nij->mij", m.table.expand(2, N, WIDTH).permute(1, 2, 0), h),
}  # fmt: skip


def _swapped(h):
    h[0] = h[1] * 2
    return h


def _view_written(h):
    view = h.view(N, -1)
    view[:2] = view[2:].detach() * 0 + view[2:]
    return h


@pytest.mark.parametrize("name", APART)
def test_operations_that_keep_examples_apart(name):
    """On the tape, in parts, with signals equal to those of plain autograd (1e-12: the order of summation)."""
    torch.manual_seed(0)
    model = Program([APART[name]]).double()
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    assert by_example(model, x)
    _compare_with_autograd(model, x)


@pytest.mark.parametrize("name", TOGETHER)
def test_operations_that_mix_examples(name):
    torch.manual_seed(0)
    model = Program([TOGETHER[name]]).double()
    assert not by_example(model, torch.randn(N, WIDTH, dtype=torch.float64))


@given(st.lists(st.sampled_from(sorted(APART) + sorted(TOGETHER)), min_size=1, max_size=5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_claim_is_true(names, seed):
    """Wherever the tape claims a network, no output depends on what another example made."""
    torch.manual_seed(seed)
    model = Program([{**APART, **TOGETHER}[name] for name in names]).double()
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    assert by_example(model, x) == (not set(names) & set(TOGETHER))
    if by_example(model, x):
        outputs = model(x)
        for example in range(N):
            (signal,) = torch.autograd.grad(outputs[example].sum(), model.made, retain_graph=True)
            assert bool((signal[torch.arange(N) != example] == 0).all())
        _compare_with_autograd(model, x)


def _compare_with_autograd(model, x, **options):
    whole = gs.ntk(model, x, by_site=True, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "has", lambda tape, value: False)
        assert not by_example(model, x, **options)
        plain = gs.ntk(model, x, by_site=True, **options)
    for name, kernel in plain.items():
        torch.testing.assert_close(whole[name], kernel, rtol=1e-11, atol=1e-12 * float(kernel.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name):
    """Some examples at a time give the rows of all of them."""
    if CASES[name].needs is not None:
        pytest.importorskip(CASES[name].needs)
    model, x, _ = CASES[name].build(dtype=torch.float64)
    options = {"outputs": CASES[name].outputs}
    with captured_by_example(model, x, **options) as one_pass:
        if not one_pass.apart or CASES[name].n == 1:
            return
        # Taken at once, as the next signals may be written where these lie.
        parts = [
            {place: (site.name, site.rows().clone()) for place, site in one_pass.sites(part)}
            for part in (slice(0, 1), slice(1, None))
        ]
        outputs = one_pass.snapshot([]).outputs
    whole = gs.capture(model, x, **options)
    places = sorted(parts[0])
    assert [parts[0][place][0] for place in places] == [site.name for site in whole.sites]
    for place, ours in zip(places, whole.sites, strict=True):
        joined = torch.cat([part[place][1] for part in parts])
        torch.testing.assert_close(joined, ours.rows(), rtol=1e-11, atol=1e-13 * float(1 + ours.rows().abs().max()))
    torch.testing.assert_close(outputs, whole.outputs, rtol=0, atol=0)


def test_the_zoo_is_mostly_on_tape():
    """So that the tests of the zoo try the tape, and autograd too."""
    claimed = 0
    for case in CASES.values():
        if case.needs is None:
            model, x, _ = case.build()
            claimed += by_example(model, x, outputs=case.outputs)
    assert 60 <= claimed <= len(CASES) - 60


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_networks_are_never_claimed(name):
    model, x, _ = COUPLED[name].build()
    with suppress(CoupledExamplesError):  # batch norm in training mode is refused before
        assert not by_example(model, x)


def test_signals_that_all_examples_share_stay_one():
    """No nonlinearity above: every example has the same signals, computed and stored once."""
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 2)
    )
    snapshot = gs.capture(model, torch.randn(6, 3))
    shared = {site.name: site.signals.stride(0) == 0 for site in snapshot.sites if hasattr(site, "signals")}
    assert shared == {"0.weight": False, "2.weight": True, "5.weight": True}


def test_a_value_overwritten_later_is_not_trusted():
    """tanh needs its input, which an operation on a view of it overwrites; autograd still knows what to do."""

    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.first(x)
            y = torch.tanh(h)
            h.view(-1).zero_()
            return self.last(y)

    torch.manual_seed(0)
    model, x = Overwrites().double(), torch.randn(5, 3, dtype=torch.float64)
    assert not by_example(model, x)
    _compare_with_autograd(model, x)


class Step(nn.Module):
    """Two linear layers with one operation between."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 4), nn.Linear(4, 2), between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def test_a_hook_on_a_gradient_is_heard():
    """A gradient reversed by a tensor's hook: autograd hears it, so the network is left to autograd."""

    def reversed_gradient(h):
        h.register_hook(lambda gradient: -2.0 * gradient)
        return torch.tanh(h)

    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    model = Step(reversed_gradient).double()
    assert not by_example(model, x)
    plain = Step(torch.tanh).double()
    plain.load_state_dict(model.state_dict())
    assert by_example(plain, x)
    ours, theirs = (gs.ntk(m, x, by_site=True)["first.weight"] for m in (model, plain))
    torch.testing.assert_close(ours, 4.0 * theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "between",
    [
        lambda h: torch.softmax(input=h, dim=1),
        lambda h: torch.transpose(h[:, None], dim0=1, dim1=2).flatten(1),
        lambda h: torch.bmm(h[:, None], mat2=torch.ones(5, 4, 4, dtype=h.dtype))[:, 0],
        lambda h: torch.cat(tensors=[h[:, :2], h[:, 2:]], axis=1),
        lambda h: h.mean(axis=1, keepdim=True) + h,
        lambda h: torch.add(h, h, alpha=2),
    ],
)
def test_unusual_ways_to_call(between):
    """On the tape or not: the kernel is right."""
    torch.manual_seed(0)
    _compare_with_autograd(Step(between).double(), torch.randn(5, 3, dtype=torch.float64))


def test_mixed_precision_inside():
    """Under autocast weights and data differ in dtype; the way back by hand would not fit."""

    def half(h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(nn.functional.linear(h.bfloat16(), weight)).float()

    weight = torch.randn(4, 4)
    model, x = Step(half), torch.randn(5, 3)
    assert not by_example(model, x)
    single = Step(lambda h: torch.tanh(nn.functional.linear(h, weight)))
    single.load_state_dict(model.state_dict())
    ours, theirs = gs.ntk(model, x), gs.ntk(single, x)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02  # bfloat16 keeps eight bits


def test_without_gradient_there_is_no_way_back():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                h = torch.tanh(self.first(x))
            return self.last(torch.tanh(self.second(x)) + h)

    torch.manual_seed(0)
    model, x = Detached().double(), torch.randn(5, 3, dtype=torch.float64)
    kernels = gs.ntk(model, x, by_site=True)
    assert float(kernels["first.weight"].abs().max()) == 0
    _compare_with_autograd(model, x)


def test_directions_that_carry_a_gradient():
    """Only their values are wanted."""
    torch.manual_seed(0)
    model, x = Step(torch.tanh), torch.randn(5, 3)
    directions = torch.randn(2, 5, 2, requires_grad=True)
    ours, theirs = gs.capture(model, x, directions=directions), gs.capture(model, x, directions=directions.detach())
    for a, b in zip(ours.sites, theirs.sites, strict=True):
        assert not a.rows().requires_grad
        assert torch.equal(a.rows(), b.rows())
