"""The dNTK of real networks: definition, forward equation, step expansions, every kind of layer."""

import copy
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gramscope as gs
from cases import CASES
from conformance import assert_operator_conforms
from fresh import run_after_torch
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.kernels import derivatives
from gramscope.kernels.crossings import ntk_step
from gramscope.kernels.dense import dense_kernel
from gramscope.kernels.expansion import Expansion
from gramscope.kernels.kernel_velocity import dntk, dntk_velocity, dntk_velocity_operator, output_curvature
from gramscope.kernels.learning_rates import layer_rates
from gramscope.kernels.tangent_kernels import TangentKernels
from references.dntk import dntk_by_definition, dntk_by_forward_equation, velocity_by_differences
from references.fingerprint import assert_same_fingerprint, fingerprint

EXACT = 1e-10  # sums of at most a few thousand float64 products; a wrong index or factor shows at order one
# Central differences of step 1e-5 leave h²·K''' ~ 1e-10, and rounding 1e-16/1e-5 of kernels up to 1e3 times larger.
DIFFERENCES = 2e-6


def mlp(*widths, activation=nn.Tanh):
    layers = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1]).double()


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = getattr(nn, kind)(3, 4, batch_first=True, **options)
        ways = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(ways * options.get("proj_size", 4), 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0]).mean(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.norms, self.skip = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)]), nn.Conv2d(2, 4, 1)
        self.head = nn.Linear(4, 2)
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x):
        branch = self.norms[1](self.second(F.silu(self.norms[0](self.first(x)))))
        return self.head(F.silu(branch + self.skip(x)).mean((2, 3)))


def zoo():
    yield "mlp", mlp(3, 5, 4, 2), torch.randn(4, 3)
    yield "relu", mlp(3, 6, 5, 2, activation=nn.ReLU), torch.randn(4, 3)
    convolution = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    yield "conv", nn.Sequential(*convolution).eval(), torch.randn(4, 2, 6, 6)
    yield "attention", Attention(), torch.randn(3, 3, 4)
    block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
    yield "encoder", nn.Sequential(block, nn.Flatten(), nn.Linear(12, 2)), torch.randn(3, 3, 4)
    yield "gru", Recurrent("GRU"), torch.randn(3, 3, 3)
    yield "lstm", Recurrent("LSTM"), torch.randn(3, 3, 3)
    yield "gru, two ways", Recurrent("GRU", bidirectional=True, bias=False), torch.randn(3, 3, 3)
    projected = Recurrent("LSTM", bidirectional=True, num_layers=2, proj_size=2)
    yield "projected lstm, two ways", projected, torch.randn(2, 3, 3)
    yield "residual", Residual().eval(), torch.randn(3, 2, 5, 4)
    yield "rnn relu", Recurrent("RNN", nonlinearity="relu"), torch.randn(3, 3, 3)
    groups = (nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(12, 2))
    yield "group norm", nn.Sequential(*groups), torch.randn(3, 3, 4)
    coupled = (nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    yield "batch norm in training", nn.Sequential(*coupled), torch.randn(5, 3)
    yield "tied", Tied(), torch.randn(4, 4)
    shared = nn.Linear(3, 3)
    yield "one module under two names", nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 2)), torch.randn(4, 3)
    weight_norm = nn.utils.parametrizations.weight_norm
    yield "weight norm", nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Softplus(), nn.Linear(4, 2)), torch.randn(4, 3)


def cases():
    torch.manual_seed(0)
    return {name: (model.double(), x.double()) for name, model, x in zoo()}


ZOO = cases()


def state(model, x):
    """The fingerprint without Python's random numbers, which beartype draws on to check lists under pytest."""
    return {key: value for key, value in fingerprint(model, x).items() if key != "python random numbers"}


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def contracted(dH, residual):
    moved = torch.einsum("aibjck,ck->aibj", dH, residual)
    return -(moved + moved.permute(2, 3, 0, 1))


def flat_rates(model, rates):
    return torch.cat([torch.full_like(p, rates[name]).flatten() for name, p in model.named_parameters()]).detach()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_equals_its_definition_and_the_forward_equation(depth):
    torch.manual_seed(depth)
    model = mlp(3, *[4] * (depth - 1), 2)
    x = torch.randn(3, 3, dtype=torch.float64)
    rates = layer_rates(model, lambda_b=0.4, lambda_W=1.3)
    got = dntk(model, x, metric=rates)
    definition = dntk_by_definition(model, x, flat_rates(model, rates)).reshape(got.shape)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    weights, biases = [m.weight.detach() for m in layers], [m.bias.detach() for m in layers]
    kernel, forward = dntk_by_forward_equation(weights, biases, x, [0.4] * depth, [1.3] * depth)
    assert relative(got, definition) < EXACT
    assert relative(got, forward) < EXACT
    assert relative(gs.ntk_operator(model, x, metric=rates).dense().reshape(kernel.shape), kernel) < EXACT
    assert relative(got, forward.transpose(0, 2)) > 1e-2  # the slots are not alike


@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    n=st.integers(1, 4),
    activation=st.sampled_from([nn.Tanh, nn.GELU, nn.Softplus, nn.ReLU]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8, deadline=None)
def test_contractions_equal_those_of_the_definition(widths, n, activation, seed):
    torch.manual_seed(seed)
    model = mlp(*widths, activation=activation)
    x, residual = torch.randn(n, widths[0]).double(), torch.randn(n, widths[-1]).double()
    rates = torch.rand(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    dH = dntk_by_definition(model, x, rates).reshape(n, widths[-1], n, widths[-1], n, widths[-1])
    velocity, curvature = contracted(dH, residual), 0.5 * torch.einsum("aibjck,bj,ck->ai", dH, residual, residual)
    tolerance = {"rtol": EXACT, "atol": EXACT}
    torch.testing.assert_close(dntk_velocity(model, x, residual, metric=rates), velocity, **tolerance)
    torch.testing.assert_close(output_curvature(model, x, residual, metric=rates), curvature, **tolerance)
    operator = dntk_velocity_operator(model, x, residual, metric=rates)
    torch.testing.assert_close(operator.dense(), velocity.reshape(operator.shape), **tolerance)


@pytest.mark.parametrize("rated", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_velocity_of_every_kind_of_network_by_finite_differences(name, rated):
    model, x = ZOO[name]
    torch.manual_seed(1)
    residual = 0.3 * torch.randn(len(x), 2, dtype=torch.float64)
    # Along plain gradients some faults are invisible: a gradient is orthogonal to whatever the outputs do not feel.
    rates = 0.1 + torch.rand(sum(p.numel() for p in model.parameters())).double() if rated else None
    want = velocity_by_differences(model, x, residual, rates)
    before = state(model, x)
    got = dntk_velocity(model, x, residual, metric=rates)
    operator = dntk_velocity_operator(model, x, residual, metric=rates)
    assert_same_fingerprint(before, state(model, x))
    assert relative(got, want) < DIFFERENCES
    assert relative(operator.dense().reshape(got.shape), got) < EXACT
    assert relative(got, -want) > 1
    assert torch.equal(got, got.permute(2, 3, 0, 1))


@pytest.mark.parametrize(
    "name",
    [
        "embedding_sparse",
        "embedding_bag_mean",
        "embedding_bag_max",
        "embedding_bag_weighted",
        "embedding_bag_offsets",
        "pinn_residual",
        "one_parametrized_layer_called_twice",
    ],
)
def test_unusual_networks_on_fixed_sides_by_differences(name):
    """Networks of the zoo whose second derivatives torch does not have, or that take derivatives themselves."""
    case = CASES[name]
    model, x, _ = case.build()
    at = Expansion(model, x, outputs=case.outputs)
    residual = 0.1 * torch.cos(torch.arange(at.rows.size, dtype=torch.float64)).reshape(at.rows.shape)
    before = state(model, x)
    got = dntk_velocity(model, x, residual, outputs=case.outputs).reshape(at.rows.size, -1)
    operator = dntk_velocity_operator(model, x, residual, outputs=case.outputs)
    assert_same_fingerprint(before, state(model, x))
    direction = derivatives.step_direction(at, residual)
    h = 1e-4 / max(1.0, float(direction.norm()))
    kernels = [dense_kernel(at.at(-s * h * direction, keep_sides=True), None) for s in (1, -1)]
    want = (kernels[0] - kernels[1]) / (2 * h)
    assert (got - want).norm() <= 1e-5 * max(got.norm(), 1e-3 * kernels[0].norm())
    torch.testing.assert_close(operator.dense(), got, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mlp", torch.float64), ("mlp", torch.float32), ("encoder", torch.float32)]
)
def test_the_operator_conforms(name, dtype):
    model, x = ZOO[name]
    model, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    residual = 0.3 * torch.ones(len(x), 2, dtype=dtype)
    operator = dntk_velocity_operator(model, x, residual)
    want = dntk_velocity(model, x, residual).reshape(operator.shape)
    # In float32 second derivatives of attention cancel, which costs two more digits than a product of matrices.
    assert_operator_conforms(operator, want, tol={torch.float64: 1e-11, torch.float32: 1e-3}[dtype])


def losses(y):
    yield "mse", lambda f: 0.5 * (f - y).square().sum()
    yield "cross-entropy", lambda f: F.cross_entropy(f, y.argmax(1), reduction="sum")


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_slopes_of_one_step(loss):
    """Errors of the kernel's update fall as η², of the outputs' update as η³; without the terms as η and η²."""
    model, x = ZOO["mlp"]
    torch.manual_seed(2)
    loss = dict(losses(torch.randn(4, 2, dtype=torch.float64)))[loss]
    rates = layer_rates(model, lambda_b=0.7, lambda_W=1.5)
    kernel = gs.ntk_operator(model, x, metric=rates).dense()
    f = model(x).detach().requires_grad_()
    (epsilon,) = torch.autograd.grad(loss(f), f)
    velocity = dntk_velocity(model, x, loss, metric=rates).reshape(kernel.shape)
    curvature = output_curvature(model, x, loss, metric=rates)
    linear = -(kernel @ epsilon.flatten()).reshape(f.shape)
    errors = []
    for lr in (2e-3, 1e-3):
        moved = copy.deepcopy(model)
        gradients = torch.autograd.grad(loss(moved(x)), list(moved.parameters()))
        with torch.no_grad():
            for (name, p), g in zip(moved.named_parameters(), gradients, strict=True):
                p.sub_(lr * rates[name] * g)
        change = gs.ntk_operator(moved, x, metric=rates).dense() - kernel
        outputs = moved(x).detach() - f.detach()
        errors.append(
            [
                (change - lr * velocity).norm(),
                (outputs - lr * linear - lr**2 * curvature).norm(),
                change.norm(),
                (outputs - lr * linear).norm(),
            ]
        )
    slopes = [torch.log2(a / b).item() for a, b in zip(*errors, strict=True)]
    assert slopes == pytest.approx([2, 3, 1, 2], abs=0.05)


def test_hidden_layers_have_a_dntk_of_their_own():
    model, x = ZOO["mlp"]
    hidden = model[:3]
    got = dntk(model, x[:2], outputs=lambda model, x: model[:3](x), metric=1.0)
    ones = torch.ones(sum(p.numel() for p in hidden.parameters()), dtype=torch.float64)
    assert relative(got, dntk_by_definition(hidden, x[:2], ones).reshape(got.shape)) < EXACT


def test_three_sets_of_examples():
    model, x = ZOO["mlp"]
    whole = dntk(model, x)
    assert relative(dntk(model, x[:1], x[1:3], x[3:]), whole[:1, :, 1:3, :, 3:]) < EXACT
    assert relative(dntk(model, x[2:], x[:2]), whole[2:, :, :2, :, :2]) < EXACT


def test_a_probe_feels_the_step_of_other_examples():
    model, x = ZOO["mlp"]
    residual = torch.randn(3, 2, dtype=torch.float64)
    padded = torch.cat([residual, torch.zeros(1, 2, dtype=torch.float64)])
    probe = x[2:]
    want = dntk_velocity(model, x, padded)[2:, :, 2:]
    assert relative(dntk_velocity(model, x[:3], residual, probe=probe), want) < EXACT
    operator = dntk_velocity_operator(model, x[:3], residual, probe=probe)
    assert relative(operator.dense().reshape(want.shape), want) < EXACT
    want = output_curvature(model, x, padded)[2:]
    assert relative(output_curvature(model, x[:3], residual, probe=probe), want) < EXACT


def test_rates_in_every_form():
    model, x = ZOO["mlp"]
    residual = torch.ones(4, 2, dtype=torch.float64)
    named = {name: 0.5 for name, _ in model.named_parameters()}
    want = dntk_velocity(model, x, residual, metric=named)
    assert relative(want, 0.25 * dntk_velocity(model, x, residual)) < EXACT
    forms = [0.5, lambda name, p: torch.full_like(p, 0.5), flat_rates(model, named)]
    for form in forms:
        assert relative(dntk_velocity(model, x, residual, metric=form), want) < EXACT
    assert layer_rates(nn.ConvTranspose2d(4, 6, 3, groups=2), 1.0, 1.0)["weight"] == pytest.approx(1 / 18)
    per_layer = layer_rates(model, {"0": 1.0, "2": 2.0, "4": 3.0}, {"0": 3.0, "2": 5.0, "4": 4.0})
    assert per_layer["2.bias"] == 2.0
    assert per_layer["2.weight"] == 1.0


@pytest.mark.parametrize("name", ["conv", "encoder", "batch norm in training"])
@pytest.mark.parametrize("metric", ["none", "numbers", "tensors"])
def test_dense_kernels_are_those_of_products(name, metric):
    """Of examples by themselves and of coupled ones, with a rate for each parameter and for each entry."""
    model, x = ZOO[name]
    rates = {
        "none": None,
        "numbers": {n: 0.5 + i for i, (n, _) in enumerate(model.named_parameters())},
        "tensors": lambda n, p: p.detach().abs(),
    }[metric]
    at = Expansion(model, x, metric=rates)
    jacobian = at.T.dense().T
    want = (at.rates @ jacobian.T).T @ jacobian.T
    assert relative(dense_kernel(at, None), want) < EXACT


@pytest.mark.parametrize("name", ["mlp", "batch norm in training"])
@pytest.mark.parametrize("metric", [None, lambda name, p: p.detach().abs()])
def test_the_least_memory_gives_the_same_velocity(name, metric):
    model, x = ZOO[name]
    residual = torch.ones(len(x), 2, dtype=torch.float64)
    want = dntk_velocity(model, x, residual, metric=metric)
    with pytest.raises(InputError, match="memory must be at least") as refused:
        dntk_velocity(model, x, residual, metric=metric, memory=1)
    least = int(re.search(r"at least ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))
    assert relative(dntk_velocity(model, x, residual, metric=metric, memory=least), want) < 1e-13


def test_dropout_keeps_one_mask_throughout():
    """The mask is drawn once from the user's stream: operator, rows and curvature speak of one function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    x, residual = torch.randn(4, 3).double(), torch.ones(4, 2).double()
    operator = dntk_velocity_operator(model, x, residual)
    got = dntk_velocity(model, x, residual)
    assert relative(operator.dense().reshape(got.shape), got) < EXACT
    torch.rand(3)
    assert relative(operator.dense().reshape(got.shape), got) < EXACT


def test_training_afterwards_does_not_change_the_operator():
    model, x = mlp(3, 4, 1), torch.randn(3, 3).double()
    operator = dntk_velocity_operator(model, x, torch.ones(3, 1).double())
    before = operator.dense()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(operator.dense(), before)


def test_smoothed_kinks_are_those_of_the_smooth_network():
    """kink="distributional": a ReLU convolved with a Gaussian of the bandwidth."""

    class Soft(nn.Module):
        def forward(self, z):
            h = 0.3
            return z * torch.special.ndtr(z / h) + h / (2 * torch.pi) ** 0.5 * torch.exp(-0.5 * (z / h) ** 2)

    torch.manual_seed(0)
    kinked = mlp(3, 6, 5, 2, activation=nn.ReLU)
    smooth = nn.Sequential(*(Soft() if isinstance(m, nn.ReLU) else m for m in kinked))
    x, residual = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    got = dntk_velocity(kinked, x, residual, kink="distributional", bandwidth=0.3)
    want = dntk_velocity(smooth, x, residual)
    assert relative(got, want) < EXACT
    assert relative(dntk_velocity(kinked, x, residual), want) > 0.05


def soft_ramp(z, h):
    return z * torch.special.ndtr(z / h) + h / (2 * torch.pi) ** 0.5 * torch.exp(-0.5 * (z / h) ** 2)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, z):
        return self.function(z)


SMOOTH_FORMS = {
    "max": (lambda z: torch.max(z, -0.3 * z), lambda z, h: -0.3 * z + soft_ramp(1.3 * z, h)),
    "min": (lambda z: z.min(other=-0.3 * z), lambda z, h: z - soft_ramp(1.3 * z, h)),
    "fmax": (lambda z: torch.fmax(z, -0.3 * z), lambda z, h: -0.3 * z + soft_ramp(1.3 * z, h)),
    "elu": (lambda z: F.elu(z, 3.0), lambda z, h: 3 * F.elu(z) - 2 * soft_ramp(z, h)),
    "selu": (
        F.selu,
        lambda z, h: 1.0507009873554805 * (1.6732632423543772 * F.elu(z) - 0.6732632423543772 * soft_ramp(z, h)),
    ),
}


@pytest.mark.parametrize("name", SMOOTH_FORMS)
def test_kinks_in_other_words_are_smoothed_too(name):
    kinked, soft = SMOOTH_FORMS[name]
    torch.manual_seed(0)
    first, last = nn.Linear(3, 6).double(), nn.Linear(6, 2).double()
    x, residual = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    model = nn.Sequential(first, Applied(kinked), last)
    got = dntk_velocity(model, x, residual, kink="distributional", bandwidth=0.3)
    want = dntk_velocity(nn.Sequential(first, Applied(lambda z: soft(z, 0.3)), last), x, residual)
    assert relative(got, want) < EXACT
    assert relative(dntk_velocity(model, x, residual), want) > 0.05


def test_a_network_as_kernels():
    """Contractions without the tensor equal those with it, for an uneven matrix and unequal learning rates."""
    model, x = ZOO["mlp"]
    kernels = TangentKernels(model, metric=layer_rates(model, 0.5, 2.0))
    train, other = x[:3], x[2:]
    pairs = torch.randn(6, 6, dtype=torch.float64).numpy()
    vector = pairs[0]
    dense = kernels.meta(other, train, train)
    assert abs(kernels.curvature(other, train, pairs) - (dense * pairs).sum((1, 2))).max() < EXACT
    moved = kernels.meta(train, other, train)
    assert abs(kernels.transport(other, train, pairs) - (moved * pairs[:, None, :]).sum((0, 2))).max() < EXACT
    applied = kernels.meta(other, x, train) @ vector
    assert abs(kernels.applied(other, x, train, vector) - applied).max() < EXACT
    want = gs.ntk_operator(model, other, train, metric=layer_rates(model, 0.5, 2.0)).dense()
    assert abs(kernels(other, train) - want.numpy()).max() < EXACT


def test_under_inference_mode_and_without_gradients():
    model, x = ZOO["mlp"]
    want = dntk_velocity(model, x, torch.ones(4, 2, dtype=torch.float64))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            residual = torch.ones(4, 2, dtype=torch.float64)
            assert torch.equal(dntk_velocity(model, x, residual), want)
            operator = dntk_velocity_operator(model, x, residual)
            assert relative(operator.dense().reshape(want.shape), want) < EXACT


def test_bad_input():
    model, x = ZOO["mlp"]
    residual = torch.ones(4, 2, dtype=torch.float64)
    with pytest.raises(InputError, match="residual must have the shape"):
        dntk_velocity(model, x, residual[:, :1])
    with pytest.raises(InputError, match="residual must be finite"):
        dntk_velocity(model, x, residual / 0)
    with pytest.raises(InputError, match="one differentiable number"):
        output_curvature(model, x, lambda f: f)
    with pytest.raises(InputError, match="no parameter is called 'nonsense'"):
        dntk_velocity(model, x, residual, metric={"nonsense": 1.0})
    with pytest.raises(InputError, match="one entry for each of the 54 parameters"):
        dntk_velocity(model, x, residual, metric=torch.ones(3))
    with pytest.raises(InputError, match="bandwidth must be given"):
        dntk_velocity(model, x, residual, kink="distributional")
    with pytest.raises(InputError, match="memory must be at least"):
        dntk(model, x, memory=1000)
    with pytest.raises(InputError, match="memory must be at least"):
        dntk_velocity(model, x, residual, memory=1000)
    with pytest.raises(UnsupportedError, match=r"parameter 'cell\.weight_ih_l0' of GRU"):
        layer_rates(Recurrent("GRU"), 1.0, 1.0)
    pooled = nn.Sequential(nn.Conv1d(2, 3, 2), nn.MaxPool1d(2), nn.Flatten())
    with pytest.raises(UnsupportedError, match="max_pool1d has no smooth form"):
        dntk_velocity(pooled, torch.randn(2, 2, 5), torch.ones(2, 6), kink="distributional", bandwidth=0.1)


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cdist(self.layer(x)[:, None], x[:, None])[:, :, 0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Square(nn.Module):
    def __init__(self, once):
        super().__init__()
        self.layer, self.once = nn.Linear(3, 2), once

    def forward(self, x):
        return Once.apply(self.layer(x)) if self.once else self.layer(x) ** 2


@pytest.mark.parametrize(
    ("model", "name"), [(Distances(), "_cdist_backward"), (Square(True), "The backward pass of Once")]
)
def test_an_operation_without_a_second_derivative_is_named(model, name):
    x = torch.randn(3, 3)
    before = state(model, x)
    for function in (dntk_velocity, output_curvature, dntk_velocity_operator):
        with pytest.raises(UnsupportedError, match=name):
            function(model, x, lambda f: f.sum())
    assert_same_fingerprint(before, state(model, x))


STEPS = (dntk_velocity, output_curvature, dntk_velocity_operator)


def not_proven():
    """A network with an operation whose derivatives are checked at each call: an arc tangent."""
    return nn.Sequential(nn.Linear(3, 4), ArcTangent(), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()


class ArcTangent(nn.Module):
    def forward(self, z):
        return z.atan()


def test_a_difference_decides_where_second_derivatives_disagree(monkeypatch):
    """Torch's nested forward mode may be wrong: backward mode is taken where a central difference confirms it."""
    model, x = not_proven()
    want = output_curvature(model, x, lambda f: f.square().sum())
    right = derivatives.by_forward_mode
    monkeypatch.setattr(derivatives, "by_forward_mode", lambda *args: 1.01 * right(*args))
    torch.testing.assert_close(output_curvature(model, x, lambda f: f.square().sum()), want)


@pytest.mark.parametrize("function", STEPS)
def test_second_derivatives_that_no_difference_confirms_are_refused(function, monkeypatch):
    """Backward and forward mode are each other's witness: a wrong formula in one of them does not pass."""
    model, x = not_proven()
    right, difference = derivatives.by_forward_mode, derivatives._difference
    monkeypatch.setattr(derivatives, "by_forward_mode", lambda *args: 1.01 * right(*args))
    monkeypatch.setattr(derivatives, "_difference", lambda *args: 1.01 * difference(*args))
    with pytest.raises(UnsupportedError, match="not the derivative of its first"):
        function(model, x, lambda f: f.square().sum())
    monkeypatch.setitem(derivatives.DIFFERENCE_LIMIT, x.dtype, 0.1)  # as in low precision, where it tells nothing
    with pytest.raises(UnsupportedError, match="same by backward and by forward mode"):
        function(model, x, lambda f: f.square().sum())
    function(model, x, lambda f: f.square().sum(), check=False)


class ConstantSlope(torch.autograd.Function):
    """What it saves counts as constant: the gradient is right, its derivative is not."""

    @staticmethod
    def forward(ctx, z):
        ctx.slope = 1 - z.detach().tanh() ** 2
        return z.tanh()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope


class Detached(nn.Module):
    """``tanh`` whose backward pass, a hook's or a function's own, is right and wrong once it is differentiated."""

    def __init__(self, hook):
        super().__init__()
        self.layer, self.head, self.hook = nn.Linear(3, 4), nn.Linear(4, 2), hook

    def forward(self, x):
        z = self.layer(x)
        if not self.hook:
            return self.head(ConstantSlope.apply(z))
        moved = z + (z.tanh() - z).detach()
        if moved.requires_grad:
            moved.register_hook(lambda g: g * (1 - z.detach().tanh() ** 2))
        return self.head(moved)


@pytest.mark.parametrize("hook", [False, True])
def test_derivatives_that_are_silently_wrong_are_found(hook):
    model, x = Detached(hook).double(), torch.randn(5, 3).double()
    for function in (dntk_velocity, output_curvature, dntk_velocity_operator):
        with pytest.raises(UnsupportedError, match="derivative"):
            function(model, x, lambda f: f.square().sum())


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_check_would_not_refuse_a_proven_network(name):
    case = CASES[name]
    model, x, _ = case.build()
    at = Expansion(model, x, outputs=case.outputs)
    if at.proven:
        residual = torch.cos(torch.arange(at.rows.size, dtype=torch.float64)).reshape(at.rows.shape)
        direction = derivatives.step_direction(at, residual)
        derivatives.derivative(at.tangent(direction), direction)


def test_no_second_derivative_at_all():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    residual = torch.ones(4, 2)
    assert not dntk_velocity(model, x, residual).any()
    assert not dntk_velocity_operator(model, x, residual).dense().any()
    assert not output_curvature(model, x, residual).any()
    assert not dntk(model, x).any()


def test_the_first_call_makes_no_warning():
    code = (
        "import torch, warnings; warnings.simplefilter('error');"
        "from gramscope.kernels.kernel_velocity import dntk_velocity;"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1));"
        "dntk_velocity(model, torch.ones(2, 2), torch.ones(2, 1))"
    )
    run_after_torch(code)


class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.outer(self.inner(x).clamp(min=0) ** 1.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: dntk_velocity(model, x, torch.ones(4, 1)),
        lambda model, x: dntk_velocity_operator(model, x, torch.ones(4, 1)),
        lambda model, x: output_curvature(model, x, torch.ones(4, 1)),
        lambda model, x: ntk_step(model, x, torch.ones(4, 1), 0.01),
        lambda model, x: dntk(model, x),
    ],
    ids=["velocity", "operator", "curvature", "step", "dntk"],
)
def test_an_infinite_second_derivative_is_given_as_the_reason(call):
    torch.manual_seed(0)
    model, x = Power().double(), torch.randn(4, 3).double()
    with pytest.raises(InputError, match=r"second derivatives of the outputs must be finite.*a power below 2 has"):
        call(model, x)


@pytest.mark.filterwarnings("ignore:The backward pass of")
def test_rows_are_finite_where_a_product_is_not():
    """Units that are off have no curvature; the graph of a product makes 0 · ∞ of it, plain rows do not."""
    torch.manual_seed(0)
    model, x = Power().double(), torch.randn(4, 3).double()
    got = TangentKernels(model).curvature(x, x, np.eye(4))
    start, step = parameters_to_vector(model.parameters()).detach(), 1e-4

    def outputs(vector):
        vector_to_parameters(start + vector, model.parameters())
        return model(x)[:, 0].detach()

    rows = [torch.autograd.grad(model(x)[a, 0], list(model.parameters())) for a in range(4)]
    directions = [step * torch.cat([g.reshape(-1) for g in row]) for row in rows]
    want = sum(outputs(v) - 2 * outputs(0 * v) + outputs(-v) for v in directions) / step**2
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)  # differences of second order carry 1e-7 here


def test_rates_and_options_that_cannot_be_meant_are_refused():
    model, x = mlp(3, 4, 1), torch.randn(2, 3).double()
    residual = torch.ones(2, 1).double()
    for metric in (-1.0, {"0.weight": -1.0}, -torch.ones(21).double()):
        with pytest.raises(InputError, match="metric must not be negative"):
            dntk_velocity(model, x, residual, metric=metric)
    for rates in ((-1.0, 1.0), (1.0, float("nan")), (1.0, {"0": 1.0, "2": -1.0})):
        with pytest.raises(InputError, match="must be one finite number at least 0"):
            layer_rates(model, *rates)
    with pytest.raises(InputError, match="other must be"):
        layer_rates(nn.LayerNorm(3), 1.0, 1.0, other=-1.0)
    for call in (
        lambda: dntk_velocity(model, x, residual, foo=1),
        lambda: ntk_step(model, x, residual, 0.1, foo=1),
        lambda: TangentKernels(model, foo=1),
    ):
        with pytest.raises(UnsupportedError, match="there is no option 'foo'; there are metric, outputs"):
            call()


def test_contractions_that_do_not_fit_are_named():
    model, x = mlp(3, 4, 2), torch.randn(3, 3).double()
    kernels = TangentKernels(model)
    for function in (kernels.curvature, kernels.transport):
        with pytest.raises(InputError, match=r"pairs must have shape \(6, 6\)"):
            function(x, x, np.ones((3, 3)))
        with pytest.raises(InputError, match="pairs must be finite"):
            function(x, x, np.full((6, 6), np.nan))
    with pytest.raises(InputError, match=r"vector must have shape \(6,\)"):
        kernels.applied(x, x, x, np.ones(3))
