"""Networks that a stranger brought, and what broke on them: a test for each repair."""

import ast
import copy
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import gramscope as gs
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.capturing import Opened
from gramscope.kernels.crossings import kink_crossings
from gramscope.kernels.kernel_velocity import dntk_velocity
from gramscope.kernels.memory import SIGNALS
from references.jacobian import assert_kernel_close, reference_jacobian, reference_ntk
from zoo.case import Call, weight

TIGHT = 1e-10


@pytest.fixture(autouse=True)
def _in_float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class SeveralResults(torch.autograd.Function):
    """Of its three results one is used; one is no number at all. Its backward pass counts on zeros for the others."""

    @staticmethod
    def forward(x, w):
        return x @ w.T, x > 0, x.sum(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, signal, _, of_sum):
        x, w = ctx.saved_tensors
        return signal @ w + of_sum[:, None], signal.T @ x


def test_a_function_with_results_that_are_not_used():
    model = Call(lambda m, x: torch.tanh(SeveralResults.apply(x, m.w)[0]), w=weight(4, 3))
    x = torch.randn(5, 3)
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), TIGHT)


# Second derivatives ---------------------------------------------------------------------------------


def solved(m, x):
    return torch.linalg.solve(4 * torch.eye(3) + m.a @ m.a.T, torch.tanh(m.layer(x)).mT).mT


def volume(m, x):
    """What a normalising flow adds to the logarithm of a density."""
    return torch.tanh(m.layer(x)) + torch.linalg.slogdet(m.a + torch.diag_embed(x.exp()))[1][:, None]


def reflected(m, x):
    """As the orthogonal parametrisation of torch does it."""
    return torch.tanh(m.layer(x)) @ torch.linalg.householder_product(m.a.tril(), m.t)


@pytest.mark.parametrize("run", [solved, volume, reflected])
def test_velocity_where_nested_forward_mode_is_wrong_in_torch(run):
    """It takes the factors of a matrix for constants. Backward mode is right, as a difference of kernels shows."""
    model, x = Call(run, layer=nn.Linear(3, 3), a=weight(3, 3), t=weight(3)), torch.randn(4, 3)
    residual = torch.randn(4, 3)
    jacobian = reference_jacobian(model, x)
    step = {name: -torch.einsum("nc...,nc->...", rows, residual) for name, rows in jacobian.items()}
    sides = []
    for size in (1e-6, -1e-6):
        moved = Call(run, layer=nn.Linear(3, 3), a=weight(3, 3), t=weight(3))
        moved.load_state_dict({name: value + size * step[name] for name, value in model.state_dict().items()})
        sides.append(reference_ntk(moved, x))
    assert_kernel_close(dntk_velocity(model, x, residual), (sides[0] - sides[1]) / 2e-6, 1e-5)


def test_the_hessian_of_fused_attention_says_what_to_do():
    model = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    x = torch.randn(3, 2, 4)
    with pytest.raises(UnsupportedError, match=r"SDPBackend\.MATH"):
        gs.measures.sharpness(model(x).square().sum(), list(model.parameters()))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(x).square().sum()
    assert gs.measures.sharpness(loss, list(model.parameters())).value > 0


# Backward passes that keep their gradients for themselves --------------------------------------------------


class OwnCheckpoint(torch.autograd.Function):
    """Checkpointing by hand: the parameters are no arguments, and get their gradients from a backward pass inside."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, signal):
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(inputs), signal)
        return None, inputs.grad


CALLS = {
    "ntk": lambda model, x, y: gs.ntk(model, x),
    "trace": lambda model, x, y: gs.ntk(model, x, reduce="trace"),
    "capture": lambda model, x, y: gs.capture(model, x),
    "sketch": lambda model, x, y: gs.sketch(model, x),
    "Jᵀ c": lambda model, x, y: gs.ntk_operator(model, x).jacobian.T @ torch.ones(8),
    "J v": lambda model, x, y: gs.linearize(model, x).change(dict(model.named_parameters())),
    "velocity": lambda model, x, y: dntk_velocity(model, x, y),
    "explain_step": lambda model, x, y: gs.explain_step(model, x, y, lr=0.1),
    "sharpness": lambda model, x, y: gs.measures.sharpness(model(x).square().sum(), list(model.parameters())),
    "pullback": lambda model, x, y: gs.hierarchy.NetworkPullback(model, x, "i"),
    "states": lambda model, x, y: gs.propagators.GlobalNTK(model, x),
    "features": lambda model, x, y: gs.measures.feature_learning(model, x, lambda f: (f - y).square().sum()),
    "training": lambda model, x, y: gs.measures.moving_target(model, x, y, "mse", lr=0.1, steps=3, starts=(2,)),
    "influence": lambda model, x, y: gs.measures.tracin(model, x, y, x, y, loss="mse"),
}


def with_own_checkpoint(place):
    """The parameters in the function lie between others, or nothing comes after them."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *([nn.Linear(4, 2)] if place == "last" else []))
    last = nn.Identity() if place == "last" else nn.Linear(4, 2)
    run = lambda m, x: m.o(OwnCheckpoint.apply(m.inner, m.i(x)))  # noqa: E731
    return Call(run, i=nn.Linear(3, 4), inner=inner, o=last)


@contextmanager
def gradients_left_alone(model, x):
    model(x).square().sum().backward()
    before = {parameter: (parameter.grad, parameter.grad.clone()) for parameter in model.parameters()}
    yield
    for parameter, (gradient, value) in before.items():
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


@pytest.mark.parametrize("place", ["middle", "last"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_that_a_backward_pass_does_not_return_are_not_missed_in_silence(name, place):
    """The kernel came without the parameters inside, and their ``.grad`` was written."""
    model, x, y = with_own_checkpoint(place), torch.randn(4, 3), torch.randn(4, 2)
    with gradients_left_alone(model, x), pytest.raises(UnsupportedError, match="must return its gradients"):
        CALLS[name](model, x, y)


@pytest.mark.filterwarnings("ignore:The backward pass of OwnCheckpoint")
@pytest.mark.parametrize("place", ["middle", "last"])
def test_what_such_a_backward_pass_returns_is_right(place):
    """Gradients at the input pass through it like any other; only products J v are slower, and said so."""
    model, x = with_own_checkpoint(place), torch.randn(4, 3)
    rows = torch.autograd.functional.jacobian(lambda x: model.o(model.inner(model.i(x))).sum(0), x).transpose(0, 1)
    want = torch.einsum("nca,ncb->ab", rows, rows) / len(x)
    with gradients_left_alone(model, x):
        torch.testing.assert_close(gs.measures.agop(model, x), want)
        torch.testing.assert_close(gs.measures.agop_operator(model, x).dense(), want)
        transport = gs.hierarchy.Transport(model, x, "input", "o").dense().reshape(4, 2, 4, 3)
        torch.testing.assert_close(torch.einsum("ncna->nca", transport), rows)


# Where backward passes are taken, and why none of them may miss a gradient.
PASSES = {
    "capture/side_effects.py": "checked_gradients itself",
    "capture/backward_graph.py": "its callers check: signals and LinearMap.vjp by parameters, all others by inputs",
    "capture/linear_map.py": "through the graph of a checked pass, and the check for parameters in custom functions",
    "capture/weight_sites.py": "between a parameter and the weight that was made of it, both found in the graph",
    "capture/network.py": "a loss by the outputs alone",
    "hierarchy/network_pullback.py": "by layers and data, after the check for parameters in custom functions",
    "measures/gradient_outer_product.py": "by the input",
    "measures/influence.py": "a loss by the outputs alone",
    "measures/loss_curvature.py": "checked, with a graph of its own",
    "measures/moving_linearization.py": "a loss by the outputs alone",
    "propagators/neural_ode.py": "an ODE's own adjoint, which returns all",
    "propagators/state_recorder.py": "no pass: the name of one that is refused",
    "record/condensed.py": "a loss by the outputs alone",
    "tasks/greedy_training.py": "our own network",
    "cli/training_loop.py": "the training loop of the demonstration",
    "theory/activation_functions.py": "one activation function",
}


def test_a_backward_pass_elsewhere_is_a_checked_one():
    """A pass by parameters of the user's model goes through ``checked_gradients``; a new file here needs a reason."""
    source, found = Path(gs.__file__).parent, set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.autograd.grad",
                "value.backward",
                "loss.backward",
            ):
                found.add(path.relative_to(source).as_posix())
    assert found == set(PASSES)


@pytest.mark.filterwarnings("ignore:the measure")
def test_watching_such_a_network_leaves_its_gradients_alone():
    def train(watched):
        torch.manual_seed(0)
        model, x, y = with_own_checkpoint("middle"), torch.randn(4, 3), torch.randn(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = gs.watch(model, probe=(x, y), overhead=None) if watched else None
        for _ in range(3):  # gradients add up over the steps
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            if scope is not None:
                scope.step(loss=loss)
        if scope is not None:
            scope.close()
        return [(parameter.detach(), parameter.grad) for parameter in model.parameters()]

    for plain, watched in zip(train(False), train(True), strict=True):
        assert all(map(torch.equal, plain, watched))


# Shapes and numbers -------------------------------------------------------------------------------------


def test_a_parameter_without_entries():
    """As detection transformers have for extra layers that there are none of."""
    model = Call(lambda m, x: torch.tanh(m.layer(x)) + m.none.sum(), layer=nn.Linear(3, 2), none=weight(0, 1, 4))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    want = reference_ntk(model, x).reshape(8, 8)
    assert_kernel_close(gs.ntk_operator(model, x).dense(), want, TIGHT)
    assert_kernel_close(gs.ntk(model, x).reshape(8, 8), want, TIGHT)
    assert gs.explain_step(model, x, y, lr=0.1).errors["all"] < 0.5


def test_complex_parameters_linearised():
    """A step may be given as complex numbers, as the model has them."""
    model = Call(
        lambda m, x: m.out(m.layer(x).abs()), layer=nn.Linear(3, 4, dtype=torch.complex128), out=nn.Linear(4, 2)
    )
    x = torch.randn(5, 3, dtype=torch.complex128)
    flat, rows = gs.linearize(model, x), reference_jacobian(model, x)
    torch.testing.assert_close(flat(model), model(x).detach())
    step = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    want = sum(
        torch.einsum("ncp,p->nc", rows[name].flatten(2), (torch.view_as_real(s) if s.is_complex() else s).flatten())
        for name, s in step.items()
    )
    torch.testing.assert_close(flat.change(step), want)
    torch.testing.assert_close(flat({n: p.detach() + step[n] for n, p in model.named_parameters()}), model(x) + want)


@pytest.mark.filterwarnings("error:the measure")
def test_a_probe_of_complex_numbers():
    model = Call(
        lambda m, x: m.out(m.layer(x).abs()), layer=nn.Linear(3, 4, dtype=torch.complex128), out=nn.Linear(4, 2)
    )
    x = torch.randn(6, 3, dtype=torch.complex128)
    with gs.watch(model, probe=(torch.cat([x, x]), torch.randn(12, 2)), measures="probe_facts") as scope:
        scope.step()
    assert scope.records[0]["scalars"]["probe/duplicates"] == 0.5


def test_an_input_without_entries():
    """No history yet: a sequence of length zero."""
    model = Call(lambda m, x, past: m.a(x) + m.b(past).sum(1), a=nn.Linear(3, 2), b=nn.Linear(4, 2))
    x = (torch.randn(4, 3), torch.randn(4, 0, 4))
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), TIGHT)


def test_the_hessian_of_parameters_in_two_precisions():
    """The first of them is in float32; the others are not rounded to it."""
    a, b = torch.ones(2, dtype=torch.float32, requires_grad=True), torch.randn(3, requires_grad=True)
    hessian = gs.measures.HessianOperator((a.double().sum() * b**3).sum(), [a, b])
    assert hessian.dtype == torch.float64
    torch.testing.assert_close(hessian.dense()[2:, 2:], torch.diag(12 * b.detach()))


@pytest.mark.parametrize("outputs", [5, 3000])
def test_a_trace_takes_as_many_outputs_at_once_as_have_cotangents_that_fit(outputs, monkeypatch):
    """Those of 50,000 outputs at once took 60 gigabytes, of a network of one layer and six examples."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)), torch.randn(6, 3)
    made, cotangents = [], Opened.cotangents

    def noted(self, *args, **options):
        made.append(cotangents(self, *args, **options))
        return made[-1]

    monkeypatch.setattr(Opened, "cotangents", noted)
    gs.ntk(model, x, reduce="trace")
    assert sum(map(len, made)) == outputs
    assert max(each.nbytes for each in made) <= SIGNALS["cpu"]
    h, readout = torch.tanh(model[0](x)), model[2].weight
    slope = 1 - h**2
    inner = torch.einsum("ni,mi,oi->nm", slope, slope, readout**2) * (x @ x.T + 1)
    want = outputs * (h @ h.T + 1) + inner
    assert_kernel_close(gs.ntk(model, x, reduce="trace"), want.detach(), TIGHT)


def test_a_compiled_network_moves_its_linearisation():
    """Compiling puts a prefix before the names of the parameters; none was found, and nothing moved."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled, x = torch.compile(plain, backend="eager"), torch.randn(5, 3)
    flat, small = gs.linearize(compiled, x), 1e-4
    with torch.no_grad():
        before = plain(x)
        for parameter in plain.parameters():
            parameter += small * torch.randn_like(parameter)
        moved = plain(x) - before
    torch.testing.assert_close(flat(compiled) - before, moved, rtol=0, atol=1e-2 * float(moved.abs().max()))
    torch.testing.assert_close(flat(compiled), flat(plain))


def test_features_inside_a_transform_are_refused_in_words():
    model = Call(lambda m, x: torch.vmap(lambda row: m.layer(row))(x), layer=nn.Linear(3, 2))
    with pytest.raises(UnsupportedError, match="inside a transform"):
        gs.measures.network_richness(model, torch.randn(5, 3))


def test_a_model_made_in_inference_mode():
    x = torch.randn(4, 3)
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    for call in (gs.ntk, gs.ntk_operator, gs.capture):
        with pytest.raises(InputError, match="inference mode"):
            call(model, x)
    assert gs.ntk(copy.deepcopy(model), x).shape == (4, 2, 4, 2)


def test_a_lazy_model_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(InputError, match="lazy"):
        gs.ntk(model, torch.randn(4, 3))
    assert torch.nn.parameter.is_lazy(model[0].weight)


def test_a_step_of_a_network_that_casts_its_own_parameters():
    """As the router of some mixtures of experts does, to float32, in its first forward pass."""

    def run(m, x):
        m.router.float()
        return m.layer(x) * m.router(x.float()).double().sigmoid()

    model = Call(run, router=nn.Linear(3, 2), layer=nn.Linear(3, 2))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    step = gs.explain_step(model, x, y, lr=0.1, loss="half_squared")
    assert model.router.weight.dtype == torch.float64
    want = -0.1 * torch.einsum("acbd,bd->ac", reference_ntk(model, x), run(model, x).detach() - y)
    assert_kernel_close(step.predicted, want, 1e-5)


@pytest.mark.filterwarnings("ignore:The backward pass of OnceTimes")
def test_a_parameter_of_one_number_where_a_step_is_taken_row_by_row():
    model = Call(lambda m, x: m.layer(OnceTimes.apply(x, m.gain)), layer=nn.Linear(3, 2), gain=weight())
    x, c = torch.randn(4, 3), torch.randn(8)
    operator = gs.ntk_operator(model, x)
    assert_kernel_close(operator @ c, reference_ntk(model, x).reshape(8, 8) @ c, TIGHT)


class OnceTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, signal):
        x, gain = ctx.saved_tensors
        return signal * gain, (signal * x).sum()


def test_kinks_inside_a_transform_are_not_followed_and_named():
    """Their sides cannot leave ``torch.vmap``; comparing them before and after a step failed deep inside torch."""
    mapped = lambda m, x: m.o(torch.vmap(lambda row: torch.relu(m.i(row)))(x))  # noqa: E731
    model = Call(mapped, i=nn.Linear(3, 5), o=nn.Linear(5, 2))
    plain = Call(lambda m, x: m.o(torch.relu(m.i(x))), i=model.i, o=model.o)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    step, want = (gs.explain_step(m, x, y, lr=0.3, loss="half_squared") for m in (model, plain))
    torch.testing.assert_close(step.predicted, want.predicted)
    torch.testing.assert_close(step.measured, want.measured)
    assert not step.flips
    assert "relu" in step.notes[-1]
    assert kink_crossings(model, x, y, lr=0.3).nonsmooth_ops == ("relu",)
    assert kink_crossings(plain, x, y, lr=0.3).kinks == 20


def test_complex_weights_behind_an_odd_number_of_entries():
    """``view_as_complex`` takes no vector that begins at an odd place of another, and a step was cut in place."""
    model = Call(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x * m.gain) * torch.view_as_complex(m.spectral), n=4),
        gain=weight(), spectral=weight(3, 2),
    )  # fmt: skip
    x, c = torch.randn(4, 4), torch.randn(16)
    assert_kernel_close(gs.ntk_operator(model, x) @ c, reference_ntk(model, x).reshape(16, 16) @ c, TIGHT)


@pytest.mark.filterwarnings("ignore:The backward pass of an operation")
def test_a_parameter_without_a_gradient_and_with_an_infinite_second_derivative():
    """Weight standardisation of a single input: the products J v were NaN, without a word."""
    model = Call(lambda m, x: m.layer(x) * (1 + m.w.std(correction=0)), layer=nn.Linear(3, 1), w=weight(1))
    x, c = torch.randn(4, 3), torch.randn(4)
    assert_kernel_close(gs.ntk_operator(model, x) @ c, reference_ntk(model, x).reshape(4, 4) @ c, TIGHT)


def test_an_expert_that_takes_so_many_tokens_of_a_batch():
    """Five examples stay below its capacity, and so do three of each kind; five of each kind do not."""

    def run(m, x):
        tokens = x.flatten(0, 1)
        kept = torch.arange(len(tokens))[:24]
        return m.o(torch.zeros_like(tokens).index_add(0, kept, m.expert(tokens[kept])).view_as(x).sum(1))

    model = Call(run, expert=nn.Linear(3, 3), o=nn.Linear(3, 2))
    x, x2 = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    assert_kernel_close(gs.ntk(model, x, x2), reference_ntk(model, x, x2), TIGHT)


def test_x2_of_a_network_that_takes_batches_of_one_size():
    """Its initial state is a buffer with an axis of examples: x and x2 cannot be joined to one batch."""
    rnn, start = nn.GRU(3, 2, batch_first=True), torch.randn(1, 3, 2)
    model = Call(lambda m, x: m.rnn(x, m.start)[0][:, -1], rnn=rnn, start=start)
    x, x2 = torch.randn(3, 4, 3), torch.randn(3, 4, 3)
    assert_kernel_close(gs.ntk(model, x, x2), reference_ntk(model, x, x2), TIGHT)


def test_a_copy_of_a_network_that_keeps_results_in_lists_and_buffers():
    def run(m, x):
        m.doubled, m.kept = 2 * m.layer.weight, [torch.tanh(x)]
        return m.kept[0] @ m.doubled.T

    model = Call(run, layer=nn.Linear(3, 2, bias=False), doubled=torch.zeros(2, 3))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    kernel = reference_ntk(model, x)
    want = -0.1 * torch.einsum("acbd,bd->ac", kernel, model(x).detach() - y)
    step = gs.explain_step(model, x, y, lr=0.1, loss="half_squared")
    assert_kernel_close(step.predicted, want, TIGHT)


def test_velocity_where_weight_norm_takes_one_norm_of_the_whole_matrix():
    """torch's forward mode has another shape for this norm than its forward pass."""
    layer = weight_norm(nn.Linear(3, 4), dim=None)
    norm, direction = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    plain = lambda m, x: torch.tanh(x @ (m.v * (m.g / m.v.square().sum().sqrt())).T + m.b)  # noqa: E731
    model, x, residual = nn.Sequential(layer, nn.Tanh()), torch.randn(5, 3), torch.randn(5, 4)
    want = dntk_velocity(Call(plain, v=direction, g=norm, b=layer.bias), x, residual)
    assert_kernel_close(dntk_velocity(model, x, residual), want, TIGHT)


WATCHED = {
    "temperature": lambda m, x: m.layer(x) * m.scale.exp(),
    "mean of a parameter": lambda m, x: m.layer(x) * m.gain.mean(),
    "ReLU of one number an example": lambda m, x: m.layer(x) + torch.relu(m.layer(x)[:, 0])[:, None],
    "ReLU of one number": lambda m, x: m.layer(x) * torch.relu(m.scale),
    "layer and ReLU inside vmap": lambda m, x: torch.vmap(lambda row: torch.relu(m.layer(row)))(x) + m.gain,
    "layer inside vmap of grad": lambda m, x: torch.vmap(torch.func.grad(lambda row: m.layer(row).square().sum()))(x),
}


@pytest.mark.filterwarnings("error", "ignore:signal is left out", "ignore:dead_units is left out")
@pytest.mark.parametrize("name", WATCHED)
def test_watching_operations_whose_results_are_no_layer_of_outputs(name):
    """One such operation and no measure was taken at all: the first of these is CLIP's."""
    model = Call(WATCHED[name], layer=nn.Linear(3, 3), scale=weight(), gain=weight(3))
    probe, measures = (torch.randn(8, 3), torch.randn(8, 3)), ("loss", "signals", "dead_units", "feature_rank")
    with gs.watch(model, probe=probe, measures=measures, overhead=None) as scope:
        scope.step()
    record = scope.records[0]
    unseen = [said for said in ("signal", "dead_units") if "vmap" in name and (said == "signal" or "ReLU" in name)]
    assert list(record["failures"]) == unseen
    assert ("signal/layer" in record["scalars"]) != bool(unseen)


@pytest.mark.parametrize("shape", [(), (3, 1), (3, 2)])
def test_influence_where_a_loss_takes_outputs_of_any_rank(shape):
    """The loss was given flattened outputs, which met targets of another rank: refused, or broadcast against them."""
    model = Call(lambda m, x: m.layer(x).reshape(len(x), *shape), layer=nn.Linear(3, math.prod(shape)))
    x, y = torch.randn(4, 3), torch.randn(4, *shape)
    rows = [torch.cat([g.flatten() for g in _gradients(model, x[i : i + 1], y[i : i + 1])]) for i in range(4)]
    found = gs.measures.tracin(model, x, y, x, y, loss=lambda f, y: (f - y).square().sum())
    torch.testing.assert_close(found.scores, torch.stack(rows) @ torch.stack(rows).T)


def _gradients(model, x, y):
    return torch.autograd.grad((model(x) - y).square().sum(), list(model.parameters()))


def test_influence_of_sequences_of_labels():
    model = Call(lambda m, x: m.layer(x), layer=nn.Linear(3, 5))
    x, y = torch.randn(4, 2, 3), torch.randint(5, (4, 2))
    found = gs.measures.tracin(model, x, y, x, y)
    want = gs.measures.tracin(model, x, y, x, y, loss=lambda f, y: nn.functional.cross_entropy(f.mT, y))
    torch.testing.assert_close(found.scores, want.scores)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("inner", ["first", "last"])
def test_states_of_a_recurrent_layer_that_sees_two_rows_of_each_trial(n, inner):
    """A sequence and its mirror image, in one batch of twice as many rows."""

    def run(m, x):
        if inner == "first":
            h = m.rnn(torch.cat([x, x.flip(1)]))[0][:, -1].unflatten(0, (2, n)).sum(0)
        else:
            h = m.rnn(torch.stack([x, x.flip(1)], 1).flatten(0, 1))[0][:, -1].unflatten(0, (n, 2)).sum(1)
        return m.o(h)

    model, x = Call(run, rnn=nn.GRU(3, 4, batch_first=True), o=nn.Linear(4, 2)), torch.randn(n, 5, 3)
    found = gs.propagators.GlobalNTK(model, x).output.dense()
    assert_kernel_close(found, reference_ntk(model, x).reshape(2 * n, 2 * n), TIGHT)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["ntk", "sketch", "explain_step", "Jᵀ c"])
def test_parameters_spread_over_processes_are_refused(name, one_process):
    """The kernel of a model that ``fully_shard`` took apart was zero, without a word."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedError, match=r"full_tensor\(\)"):
        CALLS[name](model, torch.randn(4, 3), torch.randn(4, 2))


# Gradients that torch changes -----------------------------------------------------------------------------


def looked_up_often(scaled):
    """Tables of which some rows are looked up many times; ``types`` by all examples together."""
    torch.manual_seed(0)
    tables = {
        "words": nn.Embedding(7, 3, padding_idx=0, scale_grad_by_freq=scaled),
        "bags": nn.EmbeddingBag(7, 3, mode="mean", scale_grad_by_freq=scaled),
        "types": nn.Embedding(2, 3, scale_grad_by_freq=scaled),
    }

    def run(m, ids):
        hidden = torch.tanh(m.words(ids) + m.types(torch.tensor([0, 0, 0, 1, 0])))
        return m.o(hidden.sum(1) * m.bags(ids))

    return Call(run, **tables, o=nn.Linear(3, 2))


def test_a_table_whose_gradient_is_divided_by_frequency():
    """That is a rule for steps: the derivative is another, and the same for kernels, products and their velocity."""
    model, plain = looked_up_often(True), looked_up_often(False)
    x, x2, y = torch.randint(4, (6, 5)), torch.randint(7, (3, 5)), torch.randn(6, 2)
    exact = reference_ntk(plain, x)
    assert_kernel_close(gs.ntk(model, x), exact, TIGHT)
    assert_kernel_close(gs.ntk(model, x, x2), reference_ntk(plain, x, x2), TIGHT)
    assert_kernel_close(gs.ntk_operator(model, x).dense(), exact.reshape(12, 12), TIGHT)
    torch.testing.assert_close(dntk_velocity(model, x, y), dntk_velocity(plain, x, y))
    for name, part in gs.propagators.GlobalNTK(plain, x).K_parts.items():
        torch.testing.assert_close(gs.propagators.GlobalNTK(model, x).K_parts[name].dense(), part.dense())
    # The step is torch's own, and the change of the outputs that is predicted for it is right.
    step = gs.explain_step(model, x, y, lr=1e-4)
    assert step.errors["all"] < 1e-3
    assert all(table.scale_grad_by_freq for table in (model.words, model.bags, model.types))
    nn.functional.mse_loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients[name].reshape(parameter.shape), parameter.grad)
