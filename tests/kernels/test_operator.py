"""The matrix-free kernel, the Jacobian and its transpose."""

import inspect
import math
import random

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES
from conformance import assert_operator_conforms
from gramscope.base.errors import InputError
from gramscope.kernels import JacobianOperator
from gramscope.kernels.learning_rates import flat_metric
from references.jacobian import reference_ntk
from zoo import once


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def networks():
    torch.manual_seed(0)
    yield "mlp", nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)), torch.randn(4, 3)
    yield "gru", Recurrent(), torch.randn(4, 3, 3)
    convolution = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)
    )
    yield "conv", convolution.eval(), torch.randn(4, 2, 6, 6)
    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    yield "attention", nn.Sequential(encoder, nn.Flatten(), nn.Linear(12, 2)), torch.randn(4, 3, 4)


NETWORKS = {name: (model, x) for name, model, x in networks()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NETWORKS)
def test_conforms_and_equals_brute_force(name, dtype):
    model, x = NETWORKS[name]
    model, x = model.to(dtype), x.to(dtype)
    operator = gs.ntk_operator(model, x)
    want = reference_ntk(model, x)
    assert_operator_conforms(operator, want.reshape(operator.shape).to(dtype))
    assert_operator_conforms(operator.jacobian)


def test_a_metric_weighs_the_parameters():
    model, x = NETWORKS["mlp"]
    model, x = model.double(), x.double()
    sites = reference_ntk(model, x, by_site=True)
    rates = {"0.weight": 0.5, "2.bias": 3.0}
    want = sum(rate * sites[name] for name, rate in rates.items())
    operator = gs.ntk_operator(model, x, metric=rates)
    assert_operator_conforms(operator, want.reshape(operator.shape))


def test_an_entrywise_metric_is_a_preconditioner():
    model, x = NETWORKS["mlp"]
    model, x = model.double(), x.double()
    jacobian = gs.ntk_operator(model, x).jacobian.dense()
    metric = torch.rand(jacobian.shape[1], dtype=torch.float64)
    operator = gs.ntk_operator(model, x, metric=metric)
    torch.testing.assert_close(operator.dense(), jacobian @ torch.diag(metric) @ jacobian.T, rtol=1e-12, atol=1e-12)


def test_between_two_sets():
    model, x = NETWORKS["mlp"]
    model, x = model.double(), x.double()
    x2 = torch.randn(3, 3, dtype=torch.float64)
    operator = gs.ntk_operator(model, x, x2)
    assert_operator_conforms(operator, gs.ntk(model, x, x2).reshape(operator.shape))


def test_training_afterwards_does_not_change_it():
    model, x = nn.Linear(3, 1).double(), torch.randn(4, 3, dtype=torch.float64)
    model = nn.Sequential(model, nn.Tanh())
    operator = gs.ntk_operator(model, x)
    before = operator.dense()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(operator.dense(), before)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_forward_mode_gives_the_same_products(name):
    """The way that GPUs take through convolutions, also after the model went on training."""
    model, x = NETWORKS[name]
    model, x = model.double(), x.double()
    jacobian = JacobianOperator(model, x)
    vectors = torch.randn(jacobian.cols.size, 3, dtype=torch.float64)
    want = jacobian.matmat(vectors)
    jacobian._forward_mode = True
    model.train()
    got = jacobian.matmat(vectors)
    assert jacobian._forward_mode
    assert model.training
    model.eval()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_forward_mode_without_memory_is_no_reason_for_another_way(monkeypatch):
    """A GPU that is full says so at once; an operation without a forward derivative goes backward."""
    model, x = NETWORKS["conv"]
    model, x = model.double(), x.double()
    vectors = torch.ones(JacobianOperator(model, x).cols.size, 1, dtype=torch.float64)

    def products(error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(torch.func, "jvp", fail)
        jacobian = JacobianOperator(model, x)
        jacobian._forward_mode = True
        return jacobian.matmat(vectors)

    torch.testing.assert_close(products(NotImplementedError("no derivative")), JacobianOperator(model, x) @ vectors)
    with pytest.raises(torch.OutOfMemoryError):
        products(torch.OutOfMemoryError("out of memory"))


def test_outputs_that_are_not_finite_are_refused_as_by_ntk():
    with pytest.raises(InputError, match="the model's output must be finite"):
        gs.ntk_operator(nn.Linear(2, 1), torch.full((3, 2), math.nan))


def test_a_wrong_metric_is_refused():
    model, x = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)), torch.randn(4, 3)
    with pytest.raises(InputError, match="no parameter is called 'nonsense'"):
        gs.ntk_operator(model, x, metric={"nonsense": 1.0})
    with pytest.raises(InputError, match="one entry for each of the 32 parameters"):
        gs.ntk_operator(model, x, metric=torch.ones(3))
    with pytest.raises(InputError, match=r"metric\['0.bias'\] must be a number or have the shape \(5,\)"):
        gs.ntk_operator(model, x, metric={"0.bias": torch.ones(4)})
    with pytest.raises(InputError, match=r"metric must be a number, a flat tensor.*got list"):
        inspect.unwrap(flat_metric)([1.0], dict(model.named_parameters()))


def test_a_metric_may_be_a_function_and_of_either_sign():
    """As for the dNTK; the preconditioner of a step that climbs is negative."""
    model, x = NETWORKS["mlp"]
    model, x = model.double(), x.double()
    function = gs.ntk_operator(model, x, metric=lambda name, p: -2.0 if name.endswith("bias") else 3.0)
    by_name = gs.ntk_operator(
        model, x, metric={name: -2.0 if name.endswith("bias") else 3.0 for name, _ in model.named_parameters()}
    )
    assert torch.equal(function.dense(), by_name.dense())
    assert bool((function.metric < 0).any())


def test_a_module_under_two_names_keeps_its_parameters():
    """torch's own tying of weights would put our copies back in their place."""
    shared = torch.nn.Linear(3, 3).double()
    model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared)
    weight, x = shared.weight, torch.randn(4, 3).double()
    operator = gs.ntk_operator(model, x)
    wanted = gs.ntk(model, x).flatten(2).flatten(0, 1)
    assert torch.allclose(operator.dense(), wanted, rtol=1e-12)
    assert model[0].weight is weight
    assert model[2].weight is weight


def test_operations_that_torch_differentiates_once():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4), torch.nn.Linear(4, 2)).double()
    ids = torch.randint(0, 9, (5, 3))
    wanted = gs.ntk(model, ids).flatten(2).flatten(0, 1)
    assert torch.allclose(gs.ntk_operator(model, ids).dense(), wanted, rtol=1e-12)


class PythonDropout(nn.Module):
    """Units are dropped by Python's own random numbers."""

    def forward(self, x):
        return x * torch.tensor([[random.choice([0.0, 2.0]) for _ in row] for row in x], dtype=x.dtype)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), PythonDropout()], ids=["torch", "python"])
@pytest.mark.parametrize("way", ["written out", "forward mode"])
def test_every_product_belongs_to_one_draw_of_the_masks(way, dropout):
    """torch has no second derivative of hardsigmoid, so the first J v runs the network again, and forward mode always
    does: with other masks J v and Jᵀ w would be of two networks, and the kernel asymmetric."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Hardsigmoid(), dropout, nn.Linear(8, 2)).double().train()
    x = torch.randn(4, 3, dtype=torch.float64)
    state = torch.get_rng_state()
    operator = gs.ntk_operator(model, x)
    jacobian = operator.jacobian
    jacobian._forward_mode = way == "forward mode"
    torch.rand(3)
    random.random()
    before = torch.get_rng_state()
    dense = operator.dense()
    assert jacobian._forward_mode == (way == "forward mode")
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(dense, dense.T, rtol=1e-12, atol=1e-12)
    if isinstance(dropout, PythonDropout):  # the checks of types that the tests run with draw from this stream too
        return
    torch.set_rng_state(state)
    f = model(x)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(entry, tuple(model.parameters()), retain_graph=True)])
        for entry in f.flatten()
    ]
    jacobian = torch.stack(rows)
    # torch's own slope of hardsigmoid is the float32 nearest to 1/6.
    torch.testing.assert_close(dense, jacobian @ jacobian.T, rtol=1e-6, atol=1e-12)


def test_a_model_that_overwrites_its_input_is_run_again_on_what_was_given():
    class Doubled(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    torch.manual_seed(0)
    model = nn.Sequential(Doubled(), nn.Linear(3, 4), nn.Hardsigmoid(), nn.Linear(4, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    wanted = gs.ntk(model, x).flatten(2).flatten(0, 1)
    assert torch.allclose(gs.ntk_operator(model, x).dense(), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", once.CASES)
def test_a_backward_pass_that_cannot_be_differentiated(name):
    """Exact by rows, said in a warning and in the result. Every parameter has its part, however small."""
    model, x, _ = once.CASES[name].build()
    operator = gs.ntk_operator(model, x)
    with pytest.warns(UserWarning, match="plain backward passes, one for each output"):
        operator.dense()
    assert "backward pass of" in operator.slow
    sites = reference_ntk(model, x, by_site=True)
    for site, want in sites.items():
        with pytest.warns(UserWarning, match="plain backward passes"):
            got = gs.ntk_operator(model, x, metric={site: 1.0}).dense()
        torch.testing.assert_close(got, want.reshape(operator.shape), rtol=1e-12, atol=1e-12 * float(want.norm()))


@pytest.mark.filterwarnings("ignore:The backward pass of")
@pytest.mark.parametrize("name", CASES)
def test_operator_of_the_zoo(name):
    """The whole zoo: the operator is the kernel; only networks that must take the slow way do."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build()
    operator = gs.ntk_operator(model, x, outputs=case.outputs)
    want = gs.ntk(model, x, outputs=case.outputs).reshape(operator.shape)
    torch.testing.assert_close(
        operator.dense().to(want), want, rtol=0, atol=(1e-5 if case.inner_float32 else 1e-11) * float(want.norm())
    )
    assert bool(operator.slow) == (name in once.CASES)


@pytest.mark.parametrize(
    "metric",
    [
        0.5,
        torch.tensor(0.5),
        {"0.weight": 0.5, "2.bias": torch.arange(2.0)},
        {"0.weight": torch.linspace(0, 1, 5)[:, None]},
        lambda name, p: 0.1 * p.shape[0],
        torch.linspace(-1, 1, 32),
    ],
)
def test_gradient_gram_takes_every_metric_that_the_operator_takes(metric):
    """``Γ = e K e`` with ``K = J D Jᵀ``, whatever D is given as."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)).double(), torch.randn(4, 3).double()
    e = torch.randn(4, 2).double()
    found = torch.stack(list(gs.kernels.gradient_gram(model, x, e, metric=metric).values())).sum(0)
    kernel = gs.ntk_operator(model, x, metric=metric).dense().reshape(4, 2, 4, 2)
    torch.testing.assert_close(found, torch.einsum("mc,mcnd,nd->mn", e, kernel, e), rtol=1e-10, atol=1e-12)


def test_gradient_gram_refuses_what_is_no_metric():
    model, x, e = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    given = {
        "no parameter is called 'nonsense'": {"nonsense": 1.0},
        r"metric\['weight'\] must be a number or have the shape \(2, 3\)": {"weight": torch.ones(4)},
        "one entry for each of the 8 parameters": torch.ones(7),
        r"metric\[.*\] must be finite": math.nan,
    }
    for message, metric in given.items():
        with pytest.raises(InputError, match=message):
            gs.kernels.gradient_gram(model, x, e, metric=metric)
