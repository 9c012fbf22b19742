"""Operator measures against dense sums, Lyapunov exponents against products of Jacobians, predictions against steps."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gramscope.base.axes import Axes
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.user_warnings import UndefinedMeasureWarning
from gramscope.linalg import Dense, one_sided_trace
from gramscope.propagators import (
    GlobalNTK,
    activity_modes,
    alignment,
    explained_variance_dimension,
    finite_time_exponent,
    interference,
    lyapunov_spectrum,
    mean_response,
    partial_average,
    partial_trace,
    participation_ratio,
    predict_states,
    random_modes,
    rayleigh,
    representation_alignment,
    scaled_response,
    self_referential_bias,
    structural_rank_bound,
)
from gramscope.tasks.sequences import memory_pro
from references.jacobian import relative_error

AXES = Axes(trial=2, time=3, unit=4)


def symmetric(seed: int = 0, n: int = 24) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    half = torch.randn(n, n // 2, generator=rng, dtype=torch.float64)
    return half @ half.mT


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100), st.lists(st.sampled_from(["trial", "time", "unit"]), min_size=1, unique=True))
def test_partial_trace_is_the_sum_of_diagonal_blocks(seed, over):
    rng = torch.Generator().manual_seed(seed)
    matrix = torch.randn(24, 24, generator=rng, dtype=torch.float64)
    op = Dense(matrix, AXES, AXES)
    letters = dict(zip(AXES, "abc", strict=True))
    other = {name: letter if name in over else letter.upper() for name, letter in letters.items()}
    kept = [name for name in AXES if name not in over]
    pattern = f"{''.join(letters.values())}{''.join(other.values())}->" + "".join(letters[n] for n in kept)
    pattern += "".join(other[n] for n in kept)
    size = math.prod(AXES[name] for name in kept)
    wanted = torch.einsum(pattern, matrix.reshape(*AXES.shape, *AXES.shape)).reshape(size, size)
    assert torch.allclose(partial_trace(op, over).dense(), wanted, atol=1e-12)
    assert torch.allclose(partial_average(op, over).dense() * (24 // size), wanted, atol=1e-12)
    every = matrix.reshape(*AXES.shape, *AXES.shape)
    gone = [axis for axis, name in enumerate(AXES) if name in over]
    summed = every.sum(gone + [axis + 3 for axis in gone]).reshape(size, size) / (24 // size)
    assert torch.allclose(mean_response(op, over).dense(), summed, atol=1e-12)


def test_effective_rank_and_alignment():
    a, b = symmetric(0), symmetric(1)
    op, other = Dense(a, AXES, AXES, symmetric=True), Dense(b, AXES, AXES, symmetric=True)
    values = torch.linalg.eigvalsh(a)
    exact = float(values.sum() ** 2 / (values**2).sum())
    assert participation_ratio(op).value == pytest.approx(exact)
    estimate = participation_ratio(op, products=2000)
    assert abs(estimate.value - exact) < 5 * estimate.standard_error
    cosine = float((a * b).sum() / a.norm() / b.norm())
    assert alignment(op, other).value == pytest.approx(cosine)
    rough = alignment(op, other, products=2000)
    assert abs(rough.value - cosine) < 5 * rough.standard_error
    assert alignment(op, 3 * op).value == pytest.approx(1)
    assert representation_alignment(a[0], -2 * a[0]) == pytest.approx(-1)
    assert explained_variance_dimension(torch.eye(10)) == pytest.approx(9.5)
    assert explained_variance_dimension(torch.diag(torch.tensor([1.0, 0.0]))) == pytest.approx(0.95)


def test_rayleigh_and_interference():
    a = symmetric(2)
    op = Dense(a, AXES, AXES, symmetric=True)
    values, vectors = torch.linalg.eigh(a)
    assert torch.allclose(rayleigh(op, 3 * vectors), values, atol=1e-10)
    names, found = interference(op, {"first": [0], "second": torch.tensor([False, True]), "all": [0, 1]})
    blocks = a.reshape(2, 12, 2, 12)
    wanted = blocks[0, :, 1].norm() / (blocks[0, :, 0].norm() * blocks[1, :, 1].norm()).sqrt()
    assert names == ("first", "second", "all")
    assert float(found[0, 1]) == pytest.approx(float(wanted))
    assert torch.allclose(found.diagonal(), torch.ones(3, dtype=torch.float64))
    assert float(found.max()) <= 1 + 1e-12


@pytest.mark.parametrize(
    "call",
    [
        lambda op: partial_trace(op, ["batch"]),
        lambda op: partial_trace(op, []),
        lambda op: partial_trace(op, "trial"),
        lambda op: rayleigh(op, torch.zeros(24, 1, dtype=torch.float64)),
        lambda op: rayleigh(op, torch.ones(3, 1, dtype=torch.float64)),
        lambda op: interference(op, {"a": [5]}),
        lambda op: interference(op, {"a": [0]}, axis="neuron"),
        lambda op: participation_ratio(op, products=1),
        lambda op: alignment(op, Dense(torch.eye(3).double())),
        lambda op: explained_variance_dimension(torch.eye(2), share=2.0),
    ],
)
def test_bad_measures_are_explained(call):
    # The run-time type check of the tests may speak first; without it InputError does.
    with pytest.raises(Exception, match=r"must|need|over|Type-check"):
        call(Dense(symmetric(), AXES, AXES, symmetric=True))


def one_step_jacobians(cell, x, h):
    """∂h_t/∂h_{t-1} of each step of one trial, by autograd."""
    found = []
    for t in range(x.shape[0]):
        found.append(torch.autograd.functional.jacobian(lambda s, t=t: cell(x[t], s), h))
        h = cell(x[t], h).detach()
    return found


class Wrapped(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, h):
        return self.cell(x, h)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell])
@pytest.mark.parametrize("wrapped", [False, True])
def test_lyapunov_exponents(kind, wrapped):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cell, x = kind(2, 3).double(), torch.randn(2, 12, 2, dtype=torch.float64)
    h0 = torch.zeros(2, 3, dtype=torch.float64)
    g = GlobalNTK(Wrapped(cell) if wrapped else cell, x, h0)
    for trial in range(2):
        steps = one_step_jacobians(cell, x[trial], h0[trial])
        product, q, sums = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64), torch.zeros(3).double()
        for step in steps:
            product = step @ product
            q, r = torch.linalg.qr(step @ q)
            sums += r.diagonal().abs().log()
        exact = float(torch.linalg.svdvals(product)[0].log() / 12)
        assert float(finite_time_exponent(g)[trial]) == pytest.approx(exact, abs=1e-10)
        spectrum = lyapunov_spectrum(g)[trial]
        assert torch.allclose(spectrum, (sums / 12).sort(descending=True).values, atol=1e-10)
        # The volume contracts by the product of determinants, however the directions are ordered.
        volume = sum(float(torch.linalg.slogdet(step).logabsdet) for step in steps) / 12
        assert float(spectrum.sum()) == pytest.approx(volume, abs=1e-10)
    assert lyapunov_spectrum(g, 2).shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_a_step_erases_have_no_exponent(dtype):
    torch.manual_seed(1)
    model = nn.RNN(2, 5, nonlinearity="relu", batch_first=True).to(dtype)
    g = GlobalNTK(model, torch.randn(6, 1, 2, dtype=dtype), torch.randn(1, 6, 5, dtype=dtype))
    on = (g.values.reshape(6, -1) > 0).sum(1)  # one step: units that are off pass nothing on
    assert (on < 5).any()
    assert torch.equal(lyapunov_spectrum(g).isfinite().sum(1), on)


@pytest.mark.parametrize("wrapped", [False, True])
def test_lyapunov_exponents_count_the_steps_of_each_trial(wrapped):
    cell, x = nn.GRUCell(2, 3).double(), torch.randn(2, 8, 2, dtype=torch.float64)
    h0 = torch.zeros(2, 3, dtype=torch.float64)
    model = Wrapped(cell) if wrapped else cell
    both = GlobalNTK(model, x, h0, mask=torch.tensor([8, 5]))
    short = GlobalNTK(model, x[1:, :5], h0[1:])
    assert float(finite_time_exponent(both)[1]) == pytest.approx(float(finite_time_exponent(short)[0]), abs=1e-12)
    assert torch.allclose(lyapunov_spectrum(both)[1], lyapunov_spectrum(short)[0], atol=1e-12)


def test_a_dead_trial_does_not_hide_the_others():
    model = nn.RNN(1, 2, nonlinearity="relu", bias=False, batch_first=True).double()
    with torch.no_grad():
        model.weight_ih_l0.fill_(1.0)
        model.weight_hh_l0.copy_(torch.eye(2))
    g = GlobalNTK(model, torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None, None].expand(2, 4, 1))
    assert finite_time_exponent(g).tolist() == [pytest.approx(0.0, abs=1e-12), float("-inf")]


def test_two_layers_and_lstm_states_advance_together():
    model = nn.LSTM(2, 3, 2, batch_first=True).double()
    g = GlobalNTK(model, torch.randn(2, 4, 2, dtype=torch.float64))
    q = torch.zeros(2, 4, 4, 3, dtype=torch.float64)
    q[:, 0] = torch.randn(2, 4, 3, dtype=torch.float64)
    # A push at the first step, as all layers feel it, followed by the one-step map, is P on the same push.
    whole = g.axes.unflatten(g.P @ q.flatten())
    now = whole[:, 0]
    for t in range(1, 4):
        now = g.states.stack.advance(t, now[None])[0]
        assert relative_error(now, whole[:, t]) < 1e-12


def test_scaled_response_agrees_and_does_not_overflow():
    model = nn.RNN(2, 4, batch_first=True).double()
    g = GlobalNTK(model, torch.randn(2, 6, 2, dtype=torch.float64))
    q = torch.randn(g.axes.size, dtype=torch.float64)
    scaled = scaled_response(g, q)
    drawn = [line.get_ydata().tolist() for line in scaled.plot().axes[0].lines]
    assert drawn == scaled.log_norm().tolist()
    plain = g.axes.unflatten(g.P @ q)
    assert relative_error(scaled.values * scaled.log_scale.exp()[:, :, None, None], plain) < 1e-12
    assert float(scaled.values.abs().max()) <= 1
    wild = nn.RNN(1, 3, nonlinearity="relu", bias=False, batch_first=True)
    with torch.no_grad():
        wild.weight_hh_l0.copy_(8.0 * torch.eye(3))
        wild.weight_ih_l0.fill_(1e-38)
    g = GlobalNTK(wild, torch.cat([torch.ones(1, 1, 1), torch.zeros(1, 75, 1)], dim=1))
    push = torch.zeros(1, 76, 1, 3)
    push[:, 0] = 1e30
    with pytest.raises(InputError, match="overflowed"):
        g.P @ push.flatten()
    # The size overflows float32, its logarithm does not: 1e30 · √3 · 8^75.
    expected = 30 * math.log(10) + 0.5 * math.log(3) + 75 * math.log(8)
    assert float(scaled_response(g, push.flatten()).log_norm()[0, -1]) == pytest.approx(expected, rel=1e-5)
    assert float(finite_time_exponent(g)[0]) == pytest.approx(math.log(8), rel=1e-5)


def unscaled(scaled):
    """The response itself, flat."""
    size = scaled.log_scale.exp()
    return (scaled.values * size.reshape(*size.shape, *(1,) * (scaled.values.dim() - 2))).flatten()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_scaled_response_reaches_the_layers_above_at_once(kind, layers):
    model = kind(2, 3, layers, batch_first=True).double()
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    parts = [torch.randn(layers, 2, 3, dtype=torch.float64) for _ in range(2)]
    h0 = tuple(parts) if kind is nn.LSTM else parts[0]
    for g in (GlobalNTK(model, x), GlobalNTK(model, x[:, :1], h0), GlobalNTK(model, x, h0, mask=torch.tensor([4, 2]))):
        q = torch.randn(g.axes.size, dtype=torch.float64)
        assert relative_error(unscaled(scaled_response(g, q)), g.P @ q) < 1e-12


def test_the_greatest_exponents_come_first_whatever_the_count():
    model = nn.RNN(1, 2, nonlinearity="relu", bias=False, batch_first=True).double()
    with torch.no_grad():
        model.weight_hh_l0.copy_(torch.diag(torch.tensor([0.5, 2.0])))
        model.weight_ih_l0.fill_(1.0)
    g = GlobalNTK(model, torch.ones(1, 30, 1, dtype=torch.float64))
    assert float(lyapunov_spectrum(g, 1)) == pytest.approx(math.log(2), abs=1e-12)
    g = GlobalNTK(nn.LSTM(2, 2, 2, batch_first=True).double(), torch.randn(2, 5, 2, dtype=torch.float64))
    for count in (1, 3, 8):
        assert torch.equal(lyapunov_spectrum(g, count), lyapunov_spectrum(g)[:, :count])


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x, h):
        return torch.tanh(self.a(x) + self.b(h))


class Unequal(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 3), nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x, state):
        h, c, steps = state
        c = torch.sin(self.a(x) + self.b(h))
        return torch.tanh(self.c(c) + h), c, steps + 1


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.w = nn.Linear(2, 1), nn.Parameter(torch.tensor(0.3))

    def forward(self, x, h):
        return torch.tanh(self.a(x)[:, 0] + self.w * h)


CELL_SHAPES = {
    "convolution": (Convolved, (2, 5), lambda: torch.randn(2, 3, 5).double(), {"site": 1, "unit": 3, "position": 5}),
    "unequal": (
        Unequal,
        (2,),
        lambda: (torch.randn(2, 4).double(), torch.randn(2, 3).double(), torch.zeros(2, dtype=torch.long)),
        {"state": 7},
    ),
    "scalar": (Scalar, (2,), lambda: torch.randn(2).double(), {"site": 1, "unit": 1}),
}


@pytest.mark.parametrize("lengths", [None, (3, 2)])
@pytest.mark.parametrize("case", CELL_SHAPES)
def test_cells_with_states_of_any_shape_have_an_axis_of_time(case, lengths):
    build, inputs, start, inner = CELL_SHAPES[case]
    cell, x, h0 = build().double(), torch.randn(2, 3, *inputs, dtype=torch.float64), start()
    g = GlobalNTK(cell, x, h0, mask=None if lengths is None else torch.tensor(lengths))
    assert g.axes == Axes(trial=2, time=3, **inner)
    q = torch.randn(g.axes.size, dtype=torch.float64)
    assert relative_error(unscaled(scaled_response(g, q)), g.P @ q) < 1e-12
    push = torch.where(torch.arange(3)[None, :, None] == 1, q.reshape(2, 3, -1), 0.0)
    later = (g.P @ push.flatten()).reshape(2, 3, -1)
    assert float(later[:, 0].abs().max()) == 0
    assert float(later[:, 1].abs().max()) > 0
    if lengths is not None:
        return
    parts = h0 if isinstance(h0, tuple) else (h0,)
    moving = [part for part in parts if part.is_floating_point()]

    def last(*begin):
        state = (*begin, *parts[len(begin) :]) if isinstance(h0, tuple) else begin[0]
        for t in range(3):
            state = cell(x[:1, t], state)
        return torch.cat([part.flatten() for part in (state if isinstance(h0, tuple) else (state,))[: len(begin)]])

    one = tuple(part[:1] for part in moving)
    product = torch.cat([j.flatten(1) for j in torch.autograd.functional.jacobian(last, one)], dim=1)
    exact = float(torch.linalg.matrix_norm(product, ord=2).log() / 3)
    assert float(finite_time_exponent(g)[0]) == pytest.approx(exact, abs=1e-10)


class Hoarder(nn.Module):
    def __init__(self, age):
        super().__init__()
        self.a, self.old, self.age = nn.Linear(2, 3), [], age

    def forward(self, x, h):
        self.old.append(h)
        return torch.tanh(self.a(x) + self.old[self.age if len(self.old) > 3 else -1] + h)


@pytest.mark.parametrize("age", [0, 1])
def test_a_cell_that_remembers_beside_its_state_is_told_so(age):
    g = GlobalNTK(Hoarder(age), torch.randn(2, 4, 2), torch.zeros(2, 3))
    with pytest.raises(UnsupportedError, match="part of its state"):
        finite_time_exponent(g)


def test_dynamics_need_one_direction_of_time():
    both = GlobalNTK(nn.GRU(2, 2, bidirectional=True, batch_first=True), torch.zeros(1, 2, 2))
    net = GlobalNTK(nn.Linear(2, 2), torch.zeros(1, 2))
    for g in (both, net):
        with pytest.raises(UnsupportedError, match=r"direction|recurrent"):
            lyapunov_spectrum(g)


@pytest.mark.parametrize("case", ["mlp", "gru", "rnn", "equal inputs", "tied"])
def test_rank_bound(case):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(4, 2, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
        if case == "equal inputs":
            x = x[:1].expand(4, -1).clone()
        elif case == "tied":
            layer = nn.Linear(2, 2, bias=False)
            model = nn.Sequential(layer, nn.Tanh(), layer).double()
        elif case != "mlp":
            model = (nn.GRU if case == "gru" else nn.RNN)(2, 5, batch_first=True).double()
            x = torch.randn(2, 6, 2, dtype=torch.float64)
    g = GlobalNTK(model, x)
    rank = int(torch.linalg.matrix_rank(g.K.dense(), rtol=1e-10))
    assert rank == int(torch.linalg.matrix_rank(g.operator.dense(), rtol=1e-11))
    bound = structural_rank_bound(g)
    assert rank <= bound <= g.axes.size
    if case == "equal inputs":
        # One input: rank 1 for each of the weight, its bias and the second weight, times 6 units; K itself has 12.
        assert (rank, bound) == (12, 18)


def test_the_bound_binds_under_low_rank_activity():
    model = nn.Linear(5, 3, bias=False).double()
    x = torch.ones(20, 5, dtype=torch.float64)
    x[10:] *= -2
    assert structural_rank_bound(GlobalNTK(model, x)) == 3


MODELS = {
    "gru": lambda: (nn.GRU(3, 5, batch_first=True).double(), torch.randn(3, 4, 3, dtype=torch.float64)),
    "mlp": lambda: (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(4, 3).double()),
}


@pytest.mark.parametrize("name", MODELS)
def test_predicted_change_of_states_against_a_real_step(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = MODELS[name]()
    before = [p.detach().clone() for p in model.parameters()]
    errors = [predict_states(model, x, lambda out: (out**2).mean(), lr).relative_error for lr in (1e-2, 1e-3, 1e-4)]
    # What is left is of second order in the step, so of first order in the relative error: a factor of ten each.
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    # The same measured by hand: a step of SGD on a copy.
    optimiser = torch.optim.SGD(model.parameters(), 1e-4)
    step = predict_states(model, x, lambda out: (out**2).mean(), 1e-4)
    output = model(x)[0] if name == "gru" else model(x)
    (output**2).mean().backward()
    g = GlobalNTK(model, x)
    optimiser.step()
    assert relative_error(step.measured, GlobalNTK(model, x).values - g.values) < 1e-9
    assert step.alignment > 0.999999


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_keeps_results_of_operations_is_copied():
    """Old-style weight norm keeps its weight, a result of the last run, as an attribute, which deepcopy refuses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    model(x)
    assert predict_states(model, x, lambda f: (f**2).mean(), 1e-4).relative_error < 1e-3


def test_the_cosine_with_a_zero_state_is_not_defined():
    for a, b in ((torch.zeros(3), torch.ones(3)), (torch.ones(3), torch.zeros(3))):
        with pytest.warns(UndefinedMeasureWarning, match="a state vector is zero"):
            assert math.isnan(representation_alignment(a, b))


def test_learning_is_biased_towards_its_own_activity():
    task = memory_pro(6, fixation=3, stimulus=5, delay=6, response=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.RNN(3, 32, batch_first=True)
    g = GlobalNTK(model, task.x)
    bias = self_referential_bias(g, k=3, targets=task.y)
    assert bias.ratio > 3
    assert bias.target is not None
    assert float(bias.target.max()) < float(bias.activity[0]) * 1.0001
    with pytest.raises(UnsupportedError, match="recurrent"):
        self_referential_bias(GlobalNTK(nn.Linear(2, 2), torch.randn(3, 2)))


# Published figures ---------------------------------------------------------------------------------


def published(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "mlp":
            x = torch.randn(50, 100)
            layers = [nn.Linear(100, 64)]
            for _ in range(14):
                layers += [nn.ReLU(), nn.Linear(64, 64)]
            return nn.Sequential(*layers, nn.ReLU()), x
        x = torch.randn(50, 15, 10)
        return nn.GRU(10, 64), x


@pytest.mark.parametrize(("name", "trace", "error"), [("mlp", 2314.23, 2.5e-2), ("gru", 223056.0, 6e-3)])
def test_one_sided_traces_of_the_published_networks(name, trace, error):
    """arXiv:2511.10796, recomputed exactly: median errors with 60 probes at most 2.5e-2 and 6e-3."""
    model, x = published(name)
    g = GlobalNTK(model, x)
    jacobian = g.C @ g.jacobian if name == "mlp" else g.jacobian
    estimates = [one_sided_trace(jacobian, 60, seed=seed) for seed in range(7)]
    relative = sorted(abs(e.value / trace - 1) for e in estimates)
    assert relative[3] < error
    mean = sum(e.value for e in estimates) / 7
    spread = sum(e.standard_error**2 for e in estimates) ** 0.5 / 7
    assert abs(mean - trace) < 4 * spread


def test_exact_trace_of_the_published_mlp():
    model, x = published("mlp")
    g = GlobalNTK(model, x)
    assert float(g.output.dense().diagonal().double().sum()) == pytest.approx(2314.23, rel=1e-3)


@pytest.mark.full
def test_exact_trace_of_the_published_gru():
    """Σ |Jᵀ e|² over all states; a trial's states depend on that trial alone, so trial by trial."""
    model, x = published("gru")
    total = 0.0
    for trial in range(15):
        g = GlobalNTK(model, x[:, trial : trial + 1])
        for start in range(0, g.axes.size, 640):
            total += float((g.jacobian.T @ g.P._identity_columns(start, start + 640)).double().square().sum())
    assert total == pytest.approx(223056, rel=1e-3)


def test_ordering_of_the_poster_at_gain_one():
    """K and P K P* are close to one-dimensional in time, P P* is not (poster of arXiv:2507.06381, figure 4)."""
    task = memory_pro(20)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.RNN(3, 256, batch_first=True)
    g = GlobalNTK(model, task.x)
    over = ["trial", "site", "unit"]
    dimension = {
        name: explained_variance_dimension(mean_response(op, over).matrix)
        for name, op in {"K": g.K, "PP*": g.P @ g.P.T, "PKP*": g.operator}.items()
    }
    assert dimension["K"] < 1.1
    assert dimension["PKP*"] < 1.1
    assert dimension["PP*"] > 50


@pytest.mark.parametrize("groups", ["trial", torch.tensor([0, 1]), [[0], [1]], None, {}])
def test_groups_must_have_names(groups):
    A = Dense(torch.eye(2), Axes(trial=2), Axes(trial=2), symmetric=True)
    with pytest.raises(InputError, match="by name"):
        interference(A, groups)


@pytest.mark.parametrize("places", ["x", [0.5], [2], [], [True], torch.tensor(0), [[0, 1]]])
def test_a_group_holds_places(places):
    A = Dense(torch.eye(2), Axes(trial=2), Axes(trial=2), symmetric=True)
    with pytest.raises(InputError, match="group 'a' must hold places"):
        interference(A, {"a": places})
    assert interference(A, {"a": torch.tensor([True, False]), "b": [1]})[0] == ("a", "b")


@pytest.mark.parametrize("products", [None, 4])
def test_a_zero_operator_has_neither_rank_nor_direction(products):
    zero = Dense(torch.zeros(3, 3), symmetric=True)
    one = Dense(torch.eye(3), symmetric=True)
    for measure in (
        lambda: participation_ratio(zero, products=products),
        lambda: alignment(one, zero, products=products),
        lambda: alignment(zero, one, products=products),
    ):
        with pytest.warns(UserWarning, match="not defined: the operator is zero"):
            assert math.isnan(measure().value)


def test_self_referential_bias_takes_the_modes_there_are():
    g = GlobalNTK(nn.RNN(1, 2, batch_first=True), torch.randn(2, 4, 1))
    assert len(self_referential_bias(g).activity) == 3  # two hidden units and one input
    with pytest.raises(InputError, match="from 1 to 3, got 5"):
        self_referential_bias(g, k=5)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_a_step_goes_downhill(lr):
    with pytest.raises(InputError, match="lr must be one finite number at least 0"):
        predict_states(nn.Linear(2, 1), torch.ones(2, 2), lambda f: f.sum(), lr)


# What is wrong is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda f: (f * float("nan")).sum(), "the loss must be finite"),
        (lambda f: (f - f.detach()).abs().sum().sqrt(), "the loss's gradient"),
        (lambda f: torch.ones(1, requires_grad=True).sum(), "loss must depend on the outputs"),
    ],
)
def test_a_bad_loss_is_blamed_and_not_the_parameters(loss, what):
    with pytest.raises(InputError, match=what):
        predict_states(nn.Linear(2, 1), torch.ones(2, 2), loss, 0.1)


def test_numbers_and_vectors_that_do_not_fit_are_named():
    g = GlobalNTK(nn.GRU(3, 4, batch_first=True).double(), torch.randn(2, 5, 3).double())
    wrong = float("nan")
    cases = {
        "k must be a whole number from 1 to 4": lambda: inspect.unwrap(lyapunov_spectrum)(g, 1.5),
        "k must be a whole number from 1 to 7": lambda: inspect.unwrap(activity_modes)(g, 1.5),
        "k must be a whole number from 1 to 3, the length": lambda: random_modes(3, 5),
        r"vector must have shape \(40,\)": lambda: g.split(torch.ones(3)),
        "q must be finite": lambda: scaled_response(g, torch.full((40,), wrong)),
        "matrix must be finite": lambda: explained_variance_dimension(torch.full((2, 2), wrong)),
        "targets must be finite": lambda: self_referential_bias(g, targets=torch.full((2, 5, 1), wrong)),
        "a must be finite": lambda: representation_alignment(torch.full((2,), wrong), torch.ones(2)),
    }
    for message, call in cases.items():
        with pytest.raises(InputError, match=message):
            call()


def test_a_push_in_another_precision_is_taken_in_that_of_the_states():
    g = GlobalNTK(nn.GRU(3, 4, batch_first=True).double(), torch.randn(2, 5, 3).double())
    q = torch.randn(40)
    assert torch.equal(scaled_response(g, q).values, scaled_response(g, q.double()).values)


def test_a_small_input_counts_in_the_rank_bound_of_many_examples():
    """A thousandth of the others is far above float32's rounding; LAPACK's cut, ε n σ_max, took it from 8,000 on."""
    x = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1.0, 1e-3])
    assert structural_rank_bound(GlobalNTK(nn.Linear(3, 4, bias=False), x)) == 12
    wide = x @ torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert structural_rank_bound(GlobalNTK(nn.Linear(50, 4, bias=False), wide)) == 12


def test_targets_have_the_modes_that_are_more_than_rounding():
    torch.manual_seed(0)
    g = GlobalNTK(nn.RNN(2, 6, batch_first=True), torch.randn(5, 8, 2))
    targets = torch.randn(5, 8, 1) @ torch.randn(1, 4)
    assert len(self_referential_bias(g, k=3, targets=targets).target) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["trial", "time", "unit"]), st.booleans())
def test_interference_against_the_dense_blocks(seed, axis, positive):
    rng = torch.Generator().manual_seed(seed)
    axes = Axes(trial=3, time=2, unit=5)
    matrix = symmetric(seed, 30) if positive else torch.randn(30, 30, generator=rng, dtype=torch.float64)
    op = Dense(matrix, axes, axes, symmetric=positive)
    size = axes[axis]
    groups = {"one": [size - 1], "some": torch.arange(size) != 1, "all": list(range(size))}
    places = {"one": [size - 1], "some": [i for i in range(size) if i != 1], "all": list(range(size))}
    at = axes.names.index(axis)
    blocks = matrix.reshape(*axes.shape, *axes.shape).movedim((at, at + 3), (0, 1))
    norms = torch.stack([torch.stack([blocks[a][:, b].norm() for b in places.values()]) for a in places.values()])
    wanted = norms / (norms.diagonal()[:, None] * norms.diagonal()).sqrt()
    names, found = interference(op, groups, axis)
    assert names == ("one", "some", "all")
    assert torch.allclose(found, wanted, atol=1e-12)


def test_interference_beyond_what_fits_as_a_matrix():
    """9,600 states: only blocks of columns are met. Random signs estimate it, and the seed fixes them."""
    torch.manual_seed(0)
    g = GlobalNTK(nn.RNN(3, 24, batch_first=True), torch.randn(20, 20, 3))
    groups = {"first": [0, 1], "second": [2, 3]}
    _, exact = interference(g.operator, groups)
    _, estimate = interference(g.operator, groups, products=128)
    assert torch.allclose(estimate, exact, atol=0.05)
    assert torch.equal(estimate, estimate.mT)
    assert torch.equal(estimate, interference(g.operator, groups, products=128)[1])
    assert not torch.equal(estimate, interference(g.operator, groups, products=128, seed=1)[1])
    small = GlobalNTK(nn.RNN(3, 24, batch_first=True).double(), torch.randn(4, 3, 3).double())
    dense = Dense(small.operator.dense(), small.axes, small.axes, symmetric=True)
    assert torch.allclose(interference(small.operator, groups)[1], interference(dense, groups)[1], atol=1e-10)
    with pytest.raises(InputError, match="products must be a whole number"):
        interference(dense, groups, products=0)
