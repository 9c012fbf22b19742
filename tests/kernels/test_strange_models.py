"""Networks that no rule was written for, and every network of the zoo with many examples: against brute force.

Forty examples take more than one digit of a number in base 32, and are told by three of them where that is possible.
"""

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES, all_in_full
from gramscope.base.nested import map_tensors
from gramscope.capture.network import count_examples
from gramscope.kernels import memory
from references.jacobian import assert_kernel_close, reference_ntk

MANY = 40


@pytest.fixture(autouse=True)
def always_from_a_few(monkeypatch):
    """Small networks too are looked at by a few examples first, as large ones are."""
    monkeypatch.setattr(memory, "SMALL_INPUT", -1)


class Graphs(nn.Module):
    """A batch of graphs of five nodes; messages along seven edges, each with a weight of its own."""

    shape = (5, 3)

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.edge = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.randn(7))

    def forward(self, x):
        generator = torch.Generator().manual_seed(1)
        source, target = (torch.randint(5, (7,), generator=generator) for _ in range(2))
        first = 5 * torch.arange(len(x))[:, None]
        nodes = self.into(x.flatten(0, 1))
        messages = nodes[(source + first).flatten()] * self.edge.repeat(len(x))[:, None]
        gathered = torch.zeros_like(nodes).index_add(0, (target + first).flatten(), messages)
        return self.out(torch.tanh(gathered + nodes)).view(len(x), 5, 2).sum(1)


class Sorted(nn.Module):
    """Examples are sorted by their values on the way, and put back."""

    shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.out(torch.tanh(self.into(x[order])))[order.argsort()]


class Packed(nn.Module):
    """Sequences of unequal lengths, packed."""

    shape = (4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 3, batch_first=True)

    def forward(self, x):
        lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.recurrent(packed)[1][0]


class Experts(nn.Module):
    """Two of four experts for each token."""

    shape = (4, 3)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights, self.out = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 3, 3)), nn.Linear(3, 2)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        shares, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        total = torch.zeros_like(tokens)
        for expert in range(4):
            mine, place = (chosen == expert).nonzero(as_tuple=True)
            answer = torch.tanh(tokens[mine] @ self.weights[expert]) * shares[mine, place, None]
            total = total.index_add(0, mine, answer)
        return self.out(total.view_as(x)).mean(1)


class Descending(nn.Module):
    """Gradient descent inside the network."""

    shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        z = torch.zeros_like(x).requires_grad_()
        for _ in range(3):
            energy = ((self.inner(z) - x) ** 2).sum() + (z**4).sum()
            z = z - 0.1 * torch.autograd.grad(energy, z, create_graph=True)[0]
        return z


class Chunked(nn.Module):
    """Grouped and transposed convolutions on parts of the batch."""

    shape = (2, 6)

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.transposed = nn.Conv1d(2, 4, 3, groups=2, padding=1), nn.ConvTranspose1d(4, 2, 2, stride=2)
        self.gain = nn.Parameter(torch.randn(1, 2, 1))

    def forward(self, x):
        parts = [self.transposed(torch.relu(self.grouped(part * self.gain))) for part in x.chunk(3)]
        return torch.cat(parts).flatten(1)[:, :5]


class Modulated(nn.Module):
    """Gains and offsets made of the example itself; a rotation made of a parameter."""

    shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.into, self.modulate, self.out = nn.Linear(3, 4), nn.Linear(3, 8), nn.Linear(4, 2)
        self.generator = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        gain, offset = self.modulate(x).chunk(2, -1)
        rotation = torch.linalg.matrix_exp(self.generator - self.generator.T)
        return self.out(torch.tanh(torch.einsum("ni,ij->nj", self.into(x), rotation) * gain + offset))


@pytest.mark.parametrize("n", [1, 2, 5, 17, MANY])
@pytest.mark.parametrize("kind", [Graphs, Sorted, Packed, Experts, Descending, Chunked, Modulated])
def test_strange_networks(kind, n):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(n, *kind.shape, dtype=torch.float64)
    want = reference_ntk(model, x)
    assert_kernel_close(gs.ntk(model, x), want, 1e-12)
    assert_kernel_close(gs.ntk(model, x, reduce="trace"), torch.einsum("acbc->ab", want), 1e-12)
    assert gs.capture(model, x).fallback == ()


@pytest.mark.parametrize(
    ("dtype", "scale", "tol"), [(torch.float32, 1.0, 1e-5), (torch.float32, 0.1, 1e-5), (torch.float64, 0.02, 1e-12)]
)
def test_gradients_that_vanish_over_time(dtype, scale, tol):
    """So small in early time steps that powers of two scale them inexactly, or to zero: no reason for the slow path."""
    torch.manual_seed(0)
    model = nn.RNN(2, 8, batch_first=True).to(dtype)
    with torch.no_grad():
        model.weight_hh_l0.mul_(scale)
    x = torch.randn(7, 240, 2, dtype=dtype)
    options = {"outputs": lambda model, x: model(x)[1][0, :, :2]}
    assert gs.capture(model, x, **options).fallback == ()
    assert_kernel_close(gs.ntk(model, x, **options).double(), reference_ntk(model, x, **options), tol)


def grown(x):
    """The examples of a case over and over, with noise where that is possible."""
    n, generator = count_examples(x), torch.Generator().manual_seed(0)

    def grow(tensor):
        if not tensor.dim() or len(tensor) != n:
            return tensor
        more = tensor.repeat(-(-MANY // n), *[1] * (tensor.dim() - 1))[:MANY]
        noise = 0.3 * torch.randn(more.shape, generator=generator, dtype=torch.float64)
        return more + noise.to(more.dtype) if tensor.is_floating_point() else more

    return map_tensors(grow, x)


@pytest.mark.parametrize("name", all_in_full(CASES, each=3))
def test_many_examples(name):
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=torch.float64)
    x = grown(x)
    try:
        want = reference_ntk(model, x, reduce="trace", outputs=case.outputs)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        pytest.skip(f"this network takes its own number of examples only: {error}")
    got = gs.ntk(model, x, reduce="trace", outputs=case.outputs)
    assert_kernel_close(got, want, 1e-5 if case.inner_float32 else 1e-11)  # sums over forty examples' signals
