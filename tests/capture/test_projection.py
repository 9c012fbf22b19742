"""Random mixtures of outputs: the algebra, the signs, the memory, and every call that takes outputs."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.capture import projection as module
from gramscope.capture.backward_graph import nodes_below
from references.jacobian import assert_kernel_close, reference_ntk

F64 = torch.float64


def network(outputs=7, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def inputs(n=5, seed=1):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=F64)


def signs(k, width, seed=0):
    return gs.project(k, seed).signs(0, width, torch.zeros((), dtype=F64))


@pytest.fixture
def small_chunks(monkeypatch):
    """Every product with signs is made in chunks of three outputs."""
    monkeypatch.setattr(module, "MAX_SIGNS_BYTES", 0)
    monkeypatch.setattr(module.Projection, "chunks", lambda self, width, _: zip(*_ends(width, 3), strict=True))


def _ends(width, step):
    return range(0, width, step), [min(start + step, width) for start in range(0, width, step)]


@given(
    outputs=st.integers(1, 8), k=st.integers(1, 5), n=st.integers(1, 4), m=st.integers(1, 3), seed=st.integers(0, 99)
)
@settings(max_examples=10, deadline=None)
def test_the_kernel_is_that_of_the_mixtures(outputs, k, n, m, seed):
    net, x, x2 = network(outputs, seed), inputs(n, seed), inputs(m, seed + 1)
    s = signs(k, outputs, seed) / k**0.5
    exact = torch.einsum("ci,ncmd,dj->nimj", s, reference_ntk(net, x, x2), s)
    assert_kernel_close(gs.ntk(net, x, x2, outputs=gs.project(k, seed)), exact, 1e-12)
    traced = gs.ntk(net, x, x2, outputs=gs.project(k, seed), reduce="trace")
    assert_kernel_close(traced, torch.einsum("njmj->nm", exact), 1e-12, scale=exact)


def test_the_trace_is_right_on_average():
    """The mean over all 2^7 vectors of signs of one mixture is the trace, exactly; and over seeds, as its variance."""
    net, x = network(), inputs(3)
    full = reference_ntk(net, x)
    exact = torch.einsum("ncmc->nm", full)
    symmetric = (full + full.permute(0, 3, 2, 1)) / 2
    off_diagonal = symmetric.square().sum((1, 3)) - torch.einsum("ncmc->nmc", symmetric).square().sum(2)
    k, seeds = 4, 400
    drawn = torch.stack([signs(k, 7, seed) for seed in range(seeds)])
    traces = torch.einsum("rcj,ncmd,rdj->rnm", drawn, full, drawn) / k
    expected = (2 * off_diagonal / k).sqrt()
    assert float(((traces.mean(0) - exact).abs() / (expected / seeds**0.5)).max()) < 4
    assert float((traces.std(0) / expected - 1).abs().max()) < 0.25, "the variance of the docstring"


def test_signs_are_fair_and_independent():
    drawn = signs(70, 40_000, seed=3)
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert float(drawn.mean(0).abs().max()) < 5 / 200
    products = drawn.T @ drawn / len(drawn)
    assert float((products - torch.eye(70)).abs().max()) < 5 / 200, "columns, also those of two random numbers"
    assert float((drawn[:-1] * drawn[1:]).mean().abs()) < 5 / (40_000 * 70) ** 0.5, "neighbouring outputs"


def test_fewer_signs_are_the_first_of_more():
    many = signs(130, 20_000)
    assert torch.equal(signs(5, 20_000), many[:, :5])
    assert torch.equal(signs(64, 300), many[:300, :64])
    assert not torch.equal(signs(5, 300, seed=1), many[:300, :5])
    rows = gs.project(130).signs(16_000, 17_000, torch.zeros((), dtype=F64))
    assert torch.equal(rows, many[16_000:17_000]), "from the middle"
    single = gs.project(130).signs(0, 20_000, torch.zeros(()))
    assert single.dtype == torch.float32
    assert torch.equal(single.double(), many), "whatever the dtype"


@pytest.mark.parametrize(("chunk_bytes", "width"), [(1, 300), (100, 3000), (2**20, 40_000), (2**26, 40_000)])
def test_the_same_numbers_for_every_chunking(chunk_bytes, width, monkeypatch):
    table = torch.randn(3, width, dtype=F64, generator=torch.Generator().manual_seed(0))
    mixture = gs.project(5, seed=2)
    whole = mixture.mix(table)
    monkeypatch.setattr(module, "MAX_SIGNS_BYTES", 0)
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    assert torch.allclose(mixture.mix(table), whole, rtol=1e-12, atol=1e-10)


def test_chunks_cover_all_outputs_within_their_bytes():
    mixture = gs.project(16)
    chunks = list(mixture.chunks(50_000_000, 4))
    assert chunks[0][0] == 0
    assert chunks[-1][1] == 50_000_000
    assert all(stop == start for (_, stop), (start, _) in pairwise(chunks))
    assert all((stop - start) * 16 * 4 <= module.CHUNK_BYTES for start, stop in chunks)
    wide = list(gs.project(2**26).chunks(3, 4))
    assert wide == [(0, 1), (1, 2), (2, 3)], "at least one output at a time"


def test_signs_are_not_held_for_the_backward_pass(monkeypatch):
    """The graph of a small product holds S, that of a large one makes it anew each time it is asked."""
    table = torch.ones(2, 50, dtype=F64, requires_grad=True)

    def signs_are_held():
        product = next(node for node in nodes_below([gs.project(4).mix(table)]) if node.name() == "MmBackward0")
        first, second = product._saved_mat2, product._saved_mat2
        assert torch.equal(first, second)
        return first.data_ptr() == second.data_ptr()

    assert signs_are_held()
    monkeypatch.setattr(module, "MAX_SIGNS_BYTES", 0)
    assert not signs_are_held()


def test_derivatives_of_all_orders_in_chunks(small_chunks):
    mixture = gs.project(4, seed=1)
    table = inputs(2).requires_grad_()
    assert torch.autograd.gradcheck(mixture.mix, (table,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: mixture.mix(t.tanh()), (table,))
    s = signs(4, 4, seed=1)
    assert torch.allclose(torch.func.vmap(mixture.mix, in_dims=1)(torch.stack([table, table], 1))[1], table @ s / 2)
    assert torch.allclose(torch.func.jvp(mixture.mix, (table,), (table.cos(),))[1], table.cos() @ s / 2)
    f, pullback = torch.func.vjp(mixture.mix, table)
    assert torch.allclose(pullback(f.cos())[0], f.cos() @ s.T / 2)


CALLS = {
    "ntk": lambda net, x, out: gs.ntk(net, x, outputs=out),
    "ntk in blocks": lambda net, x, out: gs.ntk(net, x, outputs=out, memory="100kB"),
    "ntk by site": lambda net, x, out: sum(gs.ntk(net, x, outputs=out, by_site=True).values()),
    "operator": lambda net, x, out: gs.ntk_operator(net, x, outputs=out).dense(),
    "jacobian": lambda net, x, out: gs.ntk_operator(net, x, outputs=out).jacobian.T.dense(),
    "agop": lambda net, x, out: gs.measures.agop(net, x, outputs=out),
    "capture": lambda net, x, out: torch.cat([s.rows().flatten() for s in gs.capture(net, x, outputs=out).sites]),
    "global kernel": lambda net, x, out: gs.propagators.GlobalNTK(net, x, outputs=out).operator.dense(),
    "pullback": lambda net, x, out: gs.hierarchy.NetworkPullback(net, x, "0", outputs=out).dense(),
}


@pytest.mark.parametrize("name", CALLS)
def test_everything_that_takes_outputs(name, small_chunks):
    """Against a function that multiplies with the signs; here with chunks, whose signs the graph makes anew."""
    net, x = network(), inputs()
    by_hand = CALLS[name](net, x, lambda model, x: model(x) @ signs(3, 7) / 3**0.5)
    assert torch.allclose(CALLS[name](net, x, gs.project(3)), by_hand, rtol=1e-9, atol=1e-11)


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Wrapped(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = network(6), kind

    def forward(self, x):
        f = self.net(x).reshape(len(x), 2, 3)
        kinds = {"tuple": (f, x), "dict": {"loss": f.sum(), "logits": f}, "dataclass": Output(f.sum(), f), "tensor": f}
        return kinds[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "dataclass"])
def test_what_models_return(kind):
    model, x = Wrapped(kind), inputs()
    expected = model.net(x) @ signs(4, 6) / 2
    assert torch.allclose(gs.project(4)(model, x), expected)


def test_composed_with_a_choice_of_outputs():
    net, x = network(), inputs()
    f = net(x)
    for of, chosen in ((slice(0, 4), f[:, :4]), ([6, 2], f[:, [6, 2]]), (lambda m, x: m(x).square(), f.square())):
        found = gs.project(3, of=of)(net, x)
        assert torch.allclose(found, chosen @ signs(3, chosen.shape[1]) / 3**0.5)
    named = gs.project(3, of="logits")(Wrapped("dict"), x)
    assert named.shape == (5, 3)
    twice = gs.project(2, of=gs.project(5, seed=1))(net, x)
    assert torch.allclose(twice, f @ signs(5, 7, 1) / 5**0.5 @ signs(2, 5) / 2**0.5)


def test_half_precision_is_mixed_in_float32():
    table = torch.full((1, 4096), 1 / 3, dtype=torch.bfloat16)
    found = gs.project(4).mix(table)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), table.double() @ signs(4, 4096) / 2, rtol=1e-5, atol=1e-5)
    net, x = network().float(), inputs().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = net(x)
        mixed = gs.project(4)(net, x)
    assert outputs.dtype == torch.bfloat16
    assert torch.allclose(mixed.double(), outputs.double() @ signs(4, 7) / 2, rtol=1e-6, atol=1e-6)


def test_global_random_streams_are_neither_read_nor_moved():
    net, x = network(), inputs()
    torch.manual_seed(5), np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    first = gs.project(3)(net, x)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]  # noqa: NPY002
    torch.manual_seed(6), np.random.seed(6)  # noqa: NPY002
    assert torch.equal(gs.project(3)(net, x), first)


@pytest.mark.parametrize("default", ["meta", torch.float16])
def test_under_defaults_of_the_user(default):
    net, x = network(), inputs()
    expected = gs.project(3)(net, x)
    before = torch.get_default_dtype()
    try:
        torch.set_default_device("meta") if default == "meta" else torch.set_default_dtype(default)
        assert torch.equal(gs.project(3)(net, x), expected)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_signs_on_a_gpu():
    assert torch.equal(
        gs.project(70).signs(0, 20_000, torch.zeros((), device="cuda")).cpu().double(), signs(70, 20_000)
    )


@pytest.mark.parametrize("bad", [0, -1, 2.0, "3", None, True])
def test_bad_k(bad):
    with pytest.raises(InputError, match=rf"k must be a whole number of at least 1, got {bad!r}\."):
        unchecked(gs.project)(bad)


@pytest.mark.parametrize("bad", [-1, 0.5, None, False])
def test_bad_seed(bad):
    with pytest.raises(InputError, match=rf"seed must be a whole number of at least 0, got {bad!r}\."):
        unchecked(gs.project)(3, seed=bad)


def unchecked(function):
    """The function without the checks of types that only the tests make."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def test_whole_numbers_of_numpy():
    net, x = network(), inputs()
    assert torch.equal(gs.project(np.int64(3), np.int32(2))(net, x), gs.project(3, 2)(net, x))


def test_a_bad_choice_of_outputs_is_explained():
    with pytest.raises(InputError, match="outputs must name columns between 0 and 6"):
        gs.ntk(network(), inputs(), outputs=gs.project(3, of=[9]))
    with pytest.raises(InputError, match="x must have a shape that the model takes"):
        gs.ntk(network(), torch.zeros(3, 9, dtype=F64), outputs=gs.project(3))
