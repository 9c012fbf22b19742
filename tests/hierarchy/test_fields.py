import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.user_warnings import UndefinedMeasureWarning
from gramscope.hierarchy import Fields
from gramscope.hierarchy.chain import check_tensor
from hierarchy.chains import cases, close, make
from references import hierarchy as reference

# Sums of a few products in float64; every identity is exact but for rounding.
TOL = 1e-12


@settings(max_examples=40, deadline=None)
@given(cases())
def test_fields_are_what_autograd_says(case):
    fields = case.fields()
    assert close(fields.outputs, reference.outputs(*case.network, case.x))
    for layer in range(fields.depth + 1):
        assert close(fields.conjugates[layer], reference.conjugate(*case.network, case.x, layer))
    for layer in range(1, fields.depth + 1):
        assert torch.equal(fields.masks[layer], fields.preactivations[layer] > 0)
        assert close(fields.signals[layer], fields.slopes(layer)[:, None] * fields.conjugates[layer])


@settings(max_examples=40, deadline=None)
@given(cases())
def test_layer_kernels_are_the_tangent_kernels(case):
    fields = case.fields()
    wanted = reference.layer_kernels(*case.network, case.x)
    for got, kernel in zip(fields.kernels(), wanted, strict=True):
        assert close(got, kernel)
    assert close(fields.kernel(), torch.stack(wanted).sum(0))
    matrix = fields.kernel().flatten(2).flatten(0, 1)
    assert float(torch.linalg.eigvalsh(matrix).min()) >= -TOL * max(1.0, float(matrix.norm()))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_shares_and_decrease(case):
    fields = case.fields()
    e = case.residual.flatten()
    each = torch.stack([e @ (k.flatten(2).flatten(0, 1) @ e) for k in reference.layer_kernels(*case.network, case.x)])
    assert close(fields.loss_decrease(case.residual), each)
    if float(each.sum()) > 1e-9:
        assert close(fields.shares(case.residual), each / each.sum(), 1e-10)
    wanted = -torch.einsum("ncmd,md->nc", fields.kernel(), case.residual)
    assert close(fields.residual_flow(case.residual), wanted)


def test_gram_matrices_and_their_views():
    case = make([5, 6, 4], outputs=2, n=3)
    fields = case.fields()
    x, b = fields.activations[1], fields.signals[2]
    on = fields.masks[2].double()
    for mu in range(3):
        for nu in range(3):
            assert torch.isclose(fields.overlap(1)[mu, nu], x[mu] @ x[nu], rtol=TOL)
            assert close(fields.correlator(2)[mu, :, nu], b[mu] @ b[nu].T)
            assert fields.coactivation(2)[mu, nu] == on[mu] @ on[nu]
            p = fields.projector(2, mu, nu)
            assert torch.equal(p, p.T)
            assert torch.equal(p @ p, p)
            assert torch.equal(p, torch.diag(on[mu]) @ torch.diag(on[nu]))
            m = fields.metric(1, mu, nu)
            assert close(m, case.weights[1].T @ p @ case.weights[1])
            assert float(torch.linalg.eigvalsh(m).min()) > -TOL
    assert close(fields.overlap_per_unit(1) * 6, fields.overlap(1))
    assert close(fields.correlator_per_unit(2) * 4, fields.correlator(2))
    assert close(fields.coactivation_per_unit(2) * 4, fields.coactivation(2))


def test_unit_readout_has_no_output_axis():
    case = make([3, 5, 4])
    fields = Fields(case.weights, case.x)
    assert fields.outputs.shape == (4,)
    assert fields.conjugates[1].shape == (4, 5)
    assert fields.kernels()[0].shape == (4, 4)
    assert close(fields.outputs, fields.activations[-1].mean(1))
    # With the paper's readout G^L is the co-activation overlap over N_L².
    assert close(fields.correlator(2), fields.coactivation(2) / 16)
    vector = Fields(case.weights, case.x, torch.full((4,), 0.25, dtype=torch.float64))
    assert close(vector.kernel(), fields.kernel())
    assert fields.signals[0] is None
    assert fields.masks[0] is None


class Written(nn.Module):
    """A chain written out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        x = x.view(x.size(0), -1)
        x = torch.relu(self.a(x))
        return self.c(nn.functional.leaky_relu(self.b(x), 0.2))


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
    "nested": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)), nn.Linear(5, 2)
    ),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.LeakyReLU(0.3), nn.Linear(5, 2, bias=False)),
    "linear between": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)),
    "dropout off": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2)).eval(),
    "by hand": Written,
}


@pytest.mark.parametrize("name", MODULES)
def test_from_module(name):
    torch.manual_seed(0)
    module = MODULES[name]().double()
    x = torch.randn(4, 2, 3, dtype=torch.float64) if name in ("nested", "by hand") else torch.randn(4, 6).double()
    fields = Fields.from_module(module, x)
    assert close(fields.outputs, module(x).detach())
    hidden = list(module.parameters())[: -1 if name == "no bias" else -2]
    jacobian = torch.cat(
        [
            torch.stack([torch.autograd.grad(f, p, retain_graph=True)[0].flatten() for f in module(x).flatten()])
            for p in hidden
        ],
        dim=1,
    )
    assert close(fields.kernel().flatten(2).flatten(0, 1), jacobian @ jacobian.T)


def test_from_module_without_readout_is_read_out_by_the_mean():
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU()).double()
    x = torch.randn(4, 3).double()
    fields = Fields.from_module(module, x)
    assert close(fields.outputs, module(x).detach().mean(1))
    given_readout = Fields.from_module(module, x, torch.ones(2, 5).double())
    assert given_readout.outputs.shape == (4, 2)


REFUSED = {
    "no chain": (lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU()), "has no place in the chain"),
    "smooth": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), "'1' is a Tanh"),
    "smooth inside": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 2)), r"'0\.1' is"),
    "bare": (lambda: nn.Tanh(), "'Tanh' is a Tanh"),
    "no activation": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), "must have an activation"),
    "one layer": (lambda: nn.Linear(6, 2), "before its readout"),
    "dropout on": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 2)), "eval"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_no_chain(name):
    make_module, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        Fields.from_module(make_module(), torch.randn(4, 6))


def tied(how):
    first, again, last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    if how == "layer":
        again = first
    elif how == "weight":
        again.weight = first.weight
    elif how == "bias":
        again.bias = first.bias
    else:
        last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), again, nn.ReLU(), last)


@pytest.mark.parametrize("how", ["layer", "weight", "bias", "readout"])
def test_tied_weights_are_refused(how):
    """As two layers they would have two gradients, and the kernel would miss what the uses share."""
    with pytest.raises(UnsupportedError, match=r"'0\.(weight|bias)' is used more than once.*gramscope\.kernel"):
        Fields.from_module(tied(how), torch.randn(4, 6))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(x + torch.relu(self.a(x)))


def test_a_branch_is_refused():
    with pytest.raises(UnsupportedError, match="NetworkPullback"):
        Fields.from_module(Residual(), torch.randn(4, 6))


class Pretender(nn.Sequential):
    """Looks like a chain to a tracer, and is none: relu(-|x|·s) is not s·min(x, 0)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.LeakyReLU(-1.0), nn.ReLU(), nn.Linear(5, 2))


def test_the_witness_catches_a_misread_chain():
    with pytest.raises(UnsupportedError, match="differs by"):
        Fields.from_module(Pretender(), torch.randn(4, 6))


def test_bad_input():
    case = make([3, 5, 4])
    with pytest.raises(InputError, match=r"readout must have shape \(4,\)"):
        Fields(case.weights, case.x, torch.ones(5).double())
    with pytest.raises(InputError, match="Add a batch axis"):
        Fields(case.weights, case.x[0])
    with pytest.raises(InputError, match="at least one example"):
        Fields(case.weights, case.x[:0])
    with pytest.raises(InputError, match="x must be finite"):
        Fields(case.weights, case.x * float("nan"))
    with pytest.raises(InputError, match="weights\\[1\\] must have 5 columns"):
        Fields([case.weights[0], case.weights[0]], case.x)
    with pytest.raises(InputError, match="finite"):
        Fields([case.weights[0] * float("inf")], case.x)
    with pytest.raises(InputError, match="list of at least one"):
        Fields([], case.x)
    fields = case.fields()
    assert not fields.predict_step(case.residual, 0.0).outputs.any()
    for lr in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="lr must be one finite number at least 0"):
            fields.predict_step(case.residual, lr)
    with pytest.raises(InputError, match="residual must have shape"):
        fields.predict_step(case.residual[:2], 0.1)
    with pytest.raises(InputError, match="layer must be a whole number from 1 to 2"):
        fields.correlator(0)
    with pytest.warns(UndefinedMeasureWarning, match="is the residual zero"):
        assert fields.shares(torch.zeros_like(case.residual)).isnan().all()


def test_integer_and_half_inputs_are_read():
    case = make([3, 5, 4])
    half = Fields([w.bfloat16() for w in case.weights], case.x.bfloat16())
    assert half.outputs.dtype == torch.float32


def test_fields_that_overflow_say_so():
    one, big = torch.ones(2, 3), 1e30 * torch.eye(3)
    with pytest.raises(InputError, match=r"activations of layer 1 must be finite.*overflow torch\.float32"):
        Fields([big], 1e30 * one)
    with pytest.raises(InputError, match="conjugate fields of layer 0"):
        Fields([big, big], 1e-30 * one)
    fields = Fields([torch.eye(3)], one)
    with pytest.raises(InputError, match="lower the learning rate"):
        fields.take_step(torch.full((2,), -1e3), 1e38)


def test_an_example_that_is_not_there_is_named():
    fields = make([3, 5, 4]).fields()
    wrong = fields.n
    for call in (
        lambda: fields.projector(1, 0, wrong),
        lambda: fields.metric(1, wrong, 0),
        lambda: fields.pullback(1).pair(0, wrong),
        lambda: inspect.unwrap(Fields.projector)(fields, 1, 0, 0.5),
    ):
        with pytest.raises(InputError, match="example must be a whole number from -"):
            call()
    assert torch.equal(fields.projector(1, 0, -1), fields.projector(1, 0, fields.n - 1))


def test_arrays_are_named_as_such():
    check = inspect.unwrap(check_tensor)
    with pytest.raises(InputError, match=r"weights\[0\] must be a torch.Tensor, got ndarray"):
        check(np.eye(2), "weights[0]")
    with pytest.raises(InputError, match=r"x must be a torch.Tensor, got ndarray"):
        inspect.unwrap(Fields.from_module.__func__)(Fields, nn.Sequential(nn.Linear(3, 2), nn.ReLU()), np.ones((2, 3)))
