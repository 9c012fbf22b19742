"""Ways to write a model that strangers tried: exact, or refused in words, whatever the number of examples."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import gramscope as gs
from gramscope.base.errors import CoupledExamplesError, InputError, UnsupportedError
from references.jacobian import assert_kernel_close, assert_sites_close, reference_jacobian, reference_ntk


class Model(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *x):
        return self.function(self, *x)


def weight_written(write):
    def function(model, x):
        weight = model.w.clone()
        write(model, weight)
        return torch.tanh(F.linear(x, weight))

    return lambda: Model(function, w=torch.randn(4, 4), u=torch.randn(4, 4))


class ZeroDiagonal(nn.Module):
    def forward(self, weight):
        weight = weight.contiguous().clone()
        weight.fill_diagonal_(0)
        return weight


def parametrised():
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", ZeroDiagonal())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2))


def put_into_zeros(model, x):
    weight = torch.zeros(4, 4, dtype=x.dtype)
    weight[:2] = model.w[:2]
    weight[2:].add_(model.u[2:])
    return torch.tanh(x @ weight)


def dense_net(model, x):
    seen = [x]
    for layer in model.layers:
        seen.append(torch.tanh(layer(torch.cat(seen, 1))))
    return model.last(torch.cat(seen, 1))


def replaced_entry(model, x):
    both = [model.a(x), model.b(x)]
    joined = torch.cat(both, 1)
    both[0] = both[1]
    return model.last(torch.tanh(joined))


def changed_padding(model, x):
    edges = [1, 2]
    padded = F.pad(model.a(x), edges)
    edges[:] = [0, 3]
    return torch.tanh(padded) @ model.w


def window(model, x):
    held = [model.a(x)]
    for _ in range(3):
        held.append(torch.tanh(model.b(torch.cat(held, 1)[:, -3:])))
        held.pop(0)
    return held[0]


def queries(spread, projected=True):
    def function(model, x):
        asked = spread(model.seeds, len(x))
        asked = model.a(asked) if projected else asked
        return model.last((asked @ x.unsqueeze(1).mT).softmax(1).mT @ asked).flatten(1)

    return lambda: Model(function, seeds=torch.randn(1, 2, 4), a=nn.Linear(4, 4), last=nn.Linear(4, 2))


def position_code(model, x):
    steps = torch.zeros(4, 4, dtype=x.dtype)
    steps[:, 0] = torch.arange(4).sin()
    return model.last(torch.tanh(x[:, None] + model.a(steps))).mean(1)


def first_zero_state(model, x):
    state = torch.zeros(len(x), 3, dtype=x.dtype)
    for _ in range(3):
        state = torch.tanh(model.a(x) + model.b(state))
    return state


def beside_its_vjp(model, x):
    """The value of torch.func.vjp is not used, its way back is."""
    y = model.a(x).tanh()
    _, back = torch.func.vjp(lambda z: model.a(z).tanh(), x)
    return y + back(y)[0] @ model.w


def behind_its_vjp(model, x):
    """A weight meets what nobody saw being made."""
    return model.last(torch.func.vjp(lambda z: model.a(z).tanh(), x)[1](torch.ones(len(x), 3, dtype=x.dtype))[0])


def slope_along_ones(model, x):
    return torch.func.jvp(lambda z: model.a(z).tanh(), (x,), (torch.ones_like(x),))[1]


MODELS = {
    "diagonal": weight_written(lambda model, w: w.fill_diagonal_(0)),
    "scaled": weight_written(lambda model, w: w.mul_(2.0)),
    "masked": weight_written(lambda model, w: w.masked_fill_(torch.eye(4, dtype=torch.bool), 0.5)),
    "an_entry_set": weight_written(lambda model, w: w.__setitem__(0, 0.0)),
    "another_added": weight_written(lambda model, w: w.__iadd__(model.u)),
    "another_multiplied": weight_written(lambda model, w: w.mul_(model.u)),
    "a_view_scaled": weight_written(lambda model, w: w[:2].mul_(3.0)),
    "a_view_of_a_view": weight_written(lambda model, w: w[:, :2].T.add_(model.u[:2])),
    "parametrised": parametrised,
    "put_into_zeros": lambda: Model(put_into_zeros, w=torch.randn(4, 4), u=torch.randn(4, 4)),
    "cdist_to_centres": lambda: Model(
        lambda model, x: torch.cdist(model.a(x), model.z), a=nn.Linear(4, 2), z=torch.randn(3, 2)
    ),
    "cdist_inside": lambda: Model(
        lambda model, x: model.last(
            torch.cdist(z := model.a(x).reshape(-1, 4, 2), z + torch.arange(8.0).view(4, 2)).flatten(1)
        ),
        a=nn.Linear(4, 8),
        last=nn.Linear(16, 2),
    ),
    "dense_net": lambda: Model(
        dense_net, layers=nn.ModuleList([nn.Linear(4, 3), nn.Linear(7, 3)]), last=nn.Linear(10, 2)
    ),
    "replaced_entry": lambda: Model(replaced_entry, a=nn.Linear(4, 3), b=nn.Linear(4, 3), last=nn.Linear(6, 1)),
    "changed_padding": lambda: Model(changed_padding, a=nn.Linear(4, 3), w=torch.randn(6, 2)),
    "window": lambda: Model(window, a=nn.Linear(4, 3), b=nn.Linear(3, 3)),
    "queries_expanded": queries(lambda seeds, n: seeds.expand(n, -1, -1)),
    "queries_repeated": queries(lambda seeds, n: seeds.repeat(n, 1, 1)),
    "queries_interleaved": queries(lambda seeds, n: seeds.repeat_interleave(n, 0), projected=False),
    "queries_joined": queries(lambda seeds, n: torch.cat([seeds] * n), projected=False),
    "position_code": lambda: Model(position_code, a=nn.Linear(4, 4), last=nn.Linear(4, 2)),
    "first_zero_state": lambda: Model(first_zero_state, a=nn.Linear(4, 3), b=nn.Linear(3, 3)),
    "beside_its_vjp": lambda: Model(beside_its_vjp, a=nn.Linear(4, 3), w=torch.randn(4, 3)),
    "behind_its_vjp": lambda: Model(behind_its_vjp, a=nn.Linear(4, 3), last=nn.Linear(4, 2)),
    "slope_along_ones": lambda: Model(slope_along_ones, a=nn.Linear(4, 3)),
    "above_a_threshold": lambda: Model(
        lambda model, x: model.a(x) * (x > model.t), a=nn.Linear(4, 4), t=torch.randn(4)
    ),
    "leaky_below_a_threshold": lambda: Model(
        lambda model, x: torch.where((z := model.a(x)) > model.t, z, model.t * z), a=nn.Linear(4, 4), t=torch.randn(4)
    ),
    "counted_by_edges": lambda: Model(
        lambda model, x: model.a(x) * torch.bucketize(x[:, :1].contiguous(), model.edges.sort().values),
        a=nn.Linear(4, 2),
        edges=torch.randn(3),
    ),
    "two_lists_side_by_side": lambda: Model(
        lambda model, x: torch.tanh(model.c(x.view(-1, 1, 2, 2)))[:, [0, 1], [1, 0]].flatten(1),
        c=nn.Conv2d(1, 2, 2, padding=1),
    ),
    "a_layer_without_units": lambda: nn.Sequential(nn.Linear(4, 0), nn.ReLU(), nn.Linear(0, 2)),
    "a_weight_without_entries_used_twice": lambda: Model(
        lambda model, x: model.a(x) + F.linear(x[:, :0], model.e) + model.e.sum(),
        a=nn.Linear(4, 2),
        e=torch.empty(2, 0),
    ),
}


def build(name, n):
    torch.manual_seed(0)
    return MODELS[name]().double(), torch.randn(n, 4, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("name", MODELS)
def test_unusual_models_are_exact(name, n):
    model, x = build(name, n)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)
    assert_sites_close(gs.ntk(model, x, by_site=True), reference_ntk(model, x, by_site=True), 1e-12)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("n", [2, 5])
def test_lists_that_move_the_examples_are_refused(n):
    def function(model, x):
        return torch.tanh(model.c(x.view(-1, 1, 2, 2)))[:, [0, 1], :, [1, 2]].flatten(1)

    model = Model(function, c=nn.Conv2d(1, 4, 2, padding=1)).double()
    with pytest.raises((CoupledExamplesError, InputError)):
        gs.ntk(model, torch.randn(n, 4, dtype=torch.float64))


def test_one_large_example_hides_no_coupling():
    def function(model, x):
        hidden = torch.tanh(model.a(x))
        centred = torch.cat([hidden[:1], hidden[1:] - hidden[1:].mean(0)])
        return model.last(centred) * torch.tensor([1e7] + [1.0] * 7, dtype=x.dtype)[:, None]

    torch.manual_seed(0)
    model, x = Model(function, a=nn.Linear(4, 5), last=nn.Linear(5, 1)).double(), torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(CoupledExamplesError):
        gs.ntk(model, x)


@pytest.mark.parametrize(("dtype", "strength"), [(torch.float64, 1e-4), (torch.float32, 1e-2)])
def test_weak_coupling_is_seen(dtype, strength):
    """A share of the other examples, well above rounding and far below what an eye would catch in the outputs."""

    def function(model, x):
        hidden = torch.tanh(model.a(x))
        return model.last(hidden + strength * hidden.mean(0))

    torch.manual_seed(0)
    model = Model(function, a=nn.Linear(4, 5), last=nn.Linear(5, 2)).to(dtype)
    with pytest.raises(CoupledExamplesError):
        gs.ntk(model, torch.randn(6, 4, dtype=dtype))


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("strength", [1e-6, 1e-8])
def test_coupling_too_weak_to_refuse_is_exact(strength, reduce):
    """Each of two batches keeps its own mean: they had one forward pass, and so another mean."""

    def function(model, x):
        hidden = torch.tanh(model.a(x))
        return model.last(hidden + strength * hidden.mean(0))

    torch.manual_seed(0)
    model = Model(function, a=nn.Linear(4, 5), last=nn.Linear(5, 2)).double()
    x, x2 = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    assert_kernel_close(gs.ntk(model, x, reduce=reduce), reference_ntk(model, x, reduce=reduce), 1e-12)
    assert_kernel_close(gs.ntk(model, x, x2, reduce=reduce), reference_ntk(model, x, x2, reduce=reduce), 1e-12)


def test_a_weight_overwritten_after_its_use():
    def function(model, x):
        weight = model.w * 1
        first = F.linear(x, weight)
        weight.mul_(2)
        return torch.tanh(first + F.linear(x, weight))

    model, x = Model(function, w=torch.randn(3, 4)).double(), torch.randn(5, 4, dtype=torch.float64)
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)


BANK = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CUT = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 2)), ()),
    "largest_of_the_batch": (
        lambda: Model(lambda model, x: torch.tanh(model.a(x / x.abs().max())), a=nn.Linear(4, 2)),
        (),
    ),
    "shared_bank_of_n_rows": (
        lambda: Model(
            lambda model, x, bank: model.last((model.a(x) @ bank.T).softmax(-1) @ bank),
            a=nn.Linear(4, 4),
            last=nn.Linear(4, 2),
        ),
        (BANK,),
    ),
    "neighbours_two_apart": (
        lambda: Model(
            lambda model, x: model.last(torch.tanh((h := model.a(x)) + 0.5 * h.roll(2, 0))),
            a=nn.Linear(4, 3),
            last=nn.Linear(3, 2),
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_no_block_changes_the_kernel_without_a_word(name):
    """With all the memory it needs, a kernel is exact (or its coupling seen); with little, the same or an error."""
    torch.manual_seed(0)
    make, shared = CUT[name]
    model, x = make().double(), (torch.randn(8, 4, dtype=torch.float64), *shared)
    try:
        whole = gs.ntk(model, x)
    except CoupledExamplesError:
        whole = None
    refused = 0
    for memory in (*range(1000, 12000, 400), *range(12000, 40000, 2000), 10**8):
        try:
            found = gs.ntk(model, x, memory=memory)
        except (InputError, CoupledExamplesError) as error:
            refused += isinstance(error, CoupledExamplesError)
        else:
            assert whole is not None
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
    assert refused


def residual(model, x):
    """u' + u of a network on a line, as users write it: x is told to require gradients."""
    x = x.requires_grad_()
    u = model(x)
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0] + u


@pytest.mark.parametrize("reduce", ["none", "trace"])
def test_outputs_that_differentiate_can_be_cut_into_blocks(reduce):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]
    exact = reference_ntk(model, x, reduce=reduce, outputs=residual)
    for memory in (5000, 8000, 10**6):
        assert_kernel_close(gs.ntk(model, x, reduce=reduce, outputs=residual, memory=memory), exact, 1e-12)
    assert not x.requires_grad


@dataclass
class Batch:
    u: torch.Tensor


def in_place(model, u):
    return torch.tanh(model.a((u.u if isinstance(u, Batch) else u).mul_(2)))


CONTAINERS = {
    "dict": lambda u: {"u": u},
    "UserDict": lambda u: UserDict(u=u),
    "data class": lambda u: (Batch(u),),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_holds_the_examples_does_not_matter(name):
    """A model that overwrites its input leaves the user's as it was, in any container, in blocks and in float64."""

    class ByName(Model):
        def forward(self, u):
            return in_place(self, u)

    torch.manual_seed(0)
    model, u = ByName(None, a=nn.Linear(4, 2)), torch.randn(8, 4)
    before, x = u.clone(), CONTAINERS[name](u)
    exact = reference_ntk(nn.Sequential(model.a, nn.Tanh()), 2 * u)
    assert_kernel_close(gs.ntk(model, x).double(), exact, 1e-5)
    assert_kernel_close(gs.ntk(model, x, memory=6000).double(), exact, 1e-5)
    assert_kernel_close(gs.ntk(model, x, precision="float64"), exact, 1e-12)
    assert torch.equal(u, before)


def test_outputs_by_mask_and_by_numpy():
    np = pytest.importorskip("numpy")
    model, x = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    wanted = gs.ntk(model, x, outputs=[0, 2])
    for chosen in (torch.tensor([True, False, True]), [True, False, True], np.array([0, 2]), torch.tensor([0, -1])):
        assert torch.equal(gs.ntk(model, x, outputs=chosen), wanted)
    for one in (torch.tensor(1), np.int64(1)):
        assert torch.equal(gs.ntk(model, x, outputs=one), gs.ntk(model, x, outputs=1))
    for wrong in (True, [True, False], torch.tensor([0.5])):
        with pytest.raises(InputError, match="output"):
            gs.ntk(model, x, outputs=wrong)


def test_x2_with_another_number_of_outputs():
    model = Model(lambda model, x: model.c(x[:, None]).flatten(1), c=nn.Conv1d(1, 1, 3))
    for reduce in ("none", "trace"):
        with pytest.raises(InputError, match="same number of outputs"):
            gs.ntk(model, torch.randn(2, 6), torch.randn(3, 8), reduce=reduce)


OPERATORS = {
    "hardsigmoid": nn.Hardsigmoid(),
    "hardswish": nn.Hardswish(),
    "cdist": Model(lambda model, h: torch.cdist(h, model.z), z=torch.randn(5, 3)),
    "logcumsumexp": Model(lambda model, h: h.logcumsumexp(1)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_products_are_right_or_refused_in_words(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), OPERATORS[name]).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    J = torch.cat([j.flatten(2) for j in reference_jacobian(model, x).values()], dim=2).flatten(0, 1)
    vector = torch.randn(len(J), dtype=torch.float64)
    found, said = None, ""
    try:
        found = gs.ntk_operator(model, x) @ vector
    except UnsupportedError as error:
        said = str(error)
    if found is None:
        assert "Use gs.ntk" in said
    else:
        # torch's backward of a hard sigmoid has 1/6 in float32, its forward derivative in float64.
        rtol = 1e-7 if name == "hardsigmoid" else 1e-10
        torch.testing.assert_close(found, J @ (J.T @ vector), rtol=rtol, atol=1e-12)
