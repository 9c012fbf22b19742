"""Neural ODEs and state-space layers: P K P* against the Jacobian of states that plain loops make, in float64."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from conformance import assert_operator_conforms
from gramscope.base.axes import Axes
from gramscope.base.errors import InputError
from gramscope.propagators import (
    S4D,
    Autonomous,
    GlobalNTK,
    NeuralODE,
    SelectiveSSM,
    diagonal_scan,
    finite_time_exponent,
    selective_scan,
    structural_rank_bound,
)
from references import flows
from references.jacobian import relative_error
from references.propagators import dense_parts, stacked_jacobian

TOLERANCE = 1e-12  # the same sums in another order


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Field(nn.Module):
    """A field that depends on time, and on an input if there is one."""

    def __init__(self, width=3):
        super().__init__()
        self.inner, self.outer = nn.Linear(width + 1, 4), nn.Linear(4, width, bias=False)

    def forward(self, t, h, x=None):
        joint = torch.cat([h, t.expand(len(h), 1)], dim=1)
        slope = self.outer(torch.tanh(self.inner(joint)))
        return slope if x is None else slope + torch.sin(x) * h


def seeded(make, *shapes):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double(), *(torch.randn(shape, dtype=torch.float64) for shape in shapes)


TIMES = torch.tensor([0.0, 0.1, 0.4, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize(("solver", "substeps"), [("euler", 1), ("midpoint", 2), ("rk4", 1)])
def test_neural_odes_against_the_tableau(solver, substeps, driven):
    field, h0, x = seeded(Field, (2, 3), (2, 3, 3))
    x = x if driven else None
    ode = NeuralODE(field, TIMES, solver=solver, substeps=substeps)
    states = flows.solver_states(field, TIMES, h0, solver, substeps, x)
    assert relative_error(ode(h0, x), states) < TOLERANCE
    given_x = h0 if x is None else (h0, x)
    g = GlobalNTK(ode, given_x)
    assert g.axes == Axes(trial=2, time=3, site=1, unit=3)
    jacobian = stacked_jacobian(states, list(field.parameters())).detach()
    assert relative_error(g.operator.dense(), jacobian @ jacobian.mT) < TOLERANCE
    assert relative_error(g.output.dense(), jacobian @ jacobian.mT) < TOLERANCE

    def step(leaves):
        before = [h0, *leaves[:-1]]
        return [
            flows.solver_states(field, TIMES[k : k + 2], h, solver, substeps, None if x is None else x[:, k : k + 1])
            for k, h in enumerate(before)
        ]

    L, J = dense_parts(step, list(states.unbind(1)), list(field.parameters()))
    one = torch.eye(18, dtype=torch.float64)
    order = torch.arange(18).reshape(3, 2, 3).transpose(0, 1).flatten()  # the reference stacks time first
    P = torch.linalg.inv(one - L)[order][:, order].detach()
    K = (J @ J.mT)[order][:, order].detach()
    assert relative_error(g.P.dense(), P) < TOLERANCE
    assert relative_error(g.K.dense(), K) < TOLERANCE
    assert relative_error((g.P @ g.K @ g.P.T).dense(), P @ K @ P.mT) < TOLERANCE


def test_solvers_converge_at_their_order():
    """The kernel of the states at fixed times converges to that of the equation itself."""
    field, h0 = seeded(Field, (1, 3))
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def kernel(solver, substeps):
        return GlobalNTK(NeuralODE(field, times, solver=solver, substeps=substeps), h0).operator.dense()

    exact = kernel("rk4", 16)
    for solver, order in (("euler", 1), ("midpoint", 2), ("rk4", 4)):
        errors = [relative_error(kernel(solver, substeps), exact) for substeps in (2, 4)]
        assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.6)


def test_the_adjoint_equation_and_the_exact_route():
    field, h0, x, w = seeded(Field, (2, 3), (2, 2, 3), (2, 2, 3))
    field.inner.bias.requires_grad_(False)
    times = torch.linspace(0, 1, 3, dtype=torch.float64)
    errors = []
    for substeps in (2, 4):
        found = []
        for adjoint in (False, True):
            ode = NeuralODE(field, times, solver="midpoint", substeps=substeps, adjoint=adjoint)
            leaves = [h0.clone().requires_grad_(), x.clone().requires_grad_()]
            inputs = [*leaves, *(p for p in ode.parameters() if p.requires_grad)]
            grads = torch.autograd.grad((ode(*leaves) * w).sum(), inputs)
            found.append(torch.cat([grad.flatten() for grad in grads]))
        errors.append(relative_error(found[1], found[0]))
    assert 0 < errors[1] < errors[0] / 3 < 0.1  # the solver's order is two
    exact = GlobalNTK(NeuralODE(field, times, solver="midpoint"), (h0, x)).operator.dense()
    ode = NeuralODE(field, times, solver="midpoint", adjoint=True)
    assert GlobalNTK(ode, (h0, x)).operator.dense().equal(exact)
    assert ode.adjoint
    inside = nn.Sequential(nn.Linear(3, 3), NeuralODE(Autonomous(nn.Linear(3, 3)), times, adjoint=True)).double()
    g, jacobian = GlobalNTK(inside, h0), stacked_jacobian
    inside[1].adjoint = False
    J = jacobian(inside(h0), list(inside.parameters())).detach()
    assert relative_error(g.output.dense(), J @ J.mT) < TOLERANCE


def test_growth_of_a_linear_flow_is_its_largest_eigenvalue():
    field = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        field.weight.copy_(torch.diag(torch.tensor([0.7, -1.0])))
    g = GlobalNTK(NeuralODE(Autonomous(field), torch.linspace(0, 2, 11).double()), torch.ones(1, 2).double())
    assert float(finite_time_exponent(g)) / 0.2 == pytest.approx(0.7, abs=1e-5)


@pytest.mark.parametrize(("layer", "reference"), [(S4D, flows.s4d_states), (SelectiveSSM, flows.selective_states)])
def test_state_space_layers_against_loops(layer, reference):
    model, x = seeded(lambda: layer(3, 2), (2, 4, 3))
    states = reference(model, x)
    assert relative_error(model(x), flows.output_of(states, model, x)) < TOLERANCE
    g = GlobalNTK(model, x)
    assert [g.select(site).rows.size for site in g.sites] == [state.numel() for state in states]
    assert g.select("h").rows.names[:4] == ("trial", "time", "unit", "mode")
    flat = torch.cat([state.reshape(2, -1) for state in states], dim=1)
    parameters = list(model.parameters())
    J = stacked_jacobian(flat, parameters).detach()
    assert relative_error(g.values, flat.detach().flatten()) < TOLERANCE
    assert relative_error(g.operator.dense(), J @ J.mT) < TOLERANCE
    one = torch.eye(g.axes.size, dtype=torch.float64)
    P, back = g.P.dense(), g.P_inverse.dense()
    assert relative_error(back @ P, one) < TOLERANCE
    local = back @ J
    assert relative_error(g.K.dense(), local @ local.mT) < TOLERANCE
    for name, parameter in model.named_parameters():
        own = back @ stacked_jacobian(flat, [parameter]).detach()
        assert float((g.K_parts[name].dense() - own @ own.mT).norm()) < TOLERANCE * float(g.K.dense().norm())
    outer = stacked_jacobian(model(x), parameters).detach()
    assert relative_error(g.output.dense(), outer @ outer.mT) < TOLERANCE
    rank = int(torch.linalg.matrix_rank(g.operator.dense(), rtol=1e-12))
    assert rank <= structural_rank_bound(g) <= g.axes.size


def test_operators_of_scans_conform():
    model, x = seeded(lambda: nn.Sequential(S4D(2, 1), nn.Tanh(), SelectiveSSM(2, 1)), (2, 2, 2))
    g = GlobalNTK(model, x)
    assert g.sites == ("0.h", "0", "0#2", "2.project", "2.steps", "2.h", "2")
    for op in (g.P, g.P_inverse, g.K):
        assert_operator_conforms(op)


class MambaBlock(nn.Module):
    """Two branches, a short causal convolution, a gate and a residual, with a first state that is learnt."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave, self.norm = nn.Linear(3, 8), nn.Linear(4, 3), nn.LayerNorm(3)
        self.conv, self.ssm = nn.Conv1d(4, 4, 2, padding=1, groups=4), SelectiveSSM(4, 2)
        self.start = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        a, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        a = nn.functional.silu(self.conv(a.mT)[..., : x.shape[1]].mT)
        y = self.ssm(a)
        more = selective_scan(y, y**2, -torch.ones(4, 2, dtype=x.dtype), a[..., :2], self.start.expand(len(x), 4, 2))
        return x + self.leave((y + more.sum(-1)) * nn.functional.silu(gate))


def test_the_output_kernel_of_a_block_of_mamba():
    model, x = seeded(MambaBlock, (2, 4, 3))
    parameters = list(model.parameters())
    J = stacked_jacobian(model(x), parameters).detach()
    assert relative_error(GlobalNTK(model, x).output.dense(), J @ J.mT) < TOLERANCE
    assert relative_error(gs.ntk(model, x).reshape(24, 24), J @ J.mT) < TOLERANCE


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3), steps=st.integers(1, 5), inner=st.sampled_from([(), (2,), (2, 3)]), complex_=st.booleans(),
    shared=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_scans_of_any_shape(n, steps, inner, complex_, shared, seed):
    """P K P* of a scan whose coefficients are the parameters themselves: the derivative of the loop."""
    rng = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if complex_ else torch.float64
    draw = lambda *shape: torch.randn(shape, dtype=dtype, generator=rng)  # noqa: E731

    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(0.5 * draw(*(inner if shared else (steps, *inner))))
            self.w = nn.Parameter(draw(*inner))

        def forward(self, x):
            h = diagonal_scan(self.a, x * self.w, x[:, 0].cos())
            return (h.real if complex_ else h).flatten(1)

    model, x = Scan(), draw(n, steps, *inner)
    h, expected = x[:, 0].cos(), []
    for t in range(steps):
        h = (model.a if shared else model.a[t]) * h + x[:, t] * model.w
        expected.append(h)
    expected = torch.stack(expected, dim=1)
    assert relative_error(model(x), (expected.real if complex_ else expected).flatten(1)) < TOLERANCE
    g = GlobalNTK(model, x)
    parts = torch.view_as_real(expected) if complex_ else expected
    real = [torch.view_as_real(p) if complex_ else p for p in model.parameters()]
    leaves = [value.detach().requires_grad_() for value in real]
    a, w = (torch.view_as_complex(value) if complex_ else value for value in leaves)
    h, again = x[:, 0].cos(), []
    for t in range(steps):
        h = (a if shared else a[t]) * h + x[:, t] * w
        again.append(torch.view_as_real(h) if complex_ else h)
    J = stacked_jacobian(torch.stack(again, dim=1), leaves).detach()
    R = g.select("h")
    assert relative_error((R @ g.operator @ R.T).dense(), J @ J.mT) < 1e-11
    assert R.rows.size == parts.numel()


FINE = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: NeuralODE(FINE, TIMES, solver="dopri5"), "adaptive"),
        (lambda: NeuralODE(FINE, TIMES, solver="leapfrog"), "must be one of"),
        (lambda: NeuralODE(FINE, TIMES[:1]), "two numbers or more"),
        (lambda: NeuralODE(FINE, TIMES[[0, 2, 1]]), "must rise"),
        (lambda: NeuralODE(FINE, TIMES, substeps=0), "substeps must be"),
        (lambda: NeuralODE(FINE, TIMES)(torch.ones(3)), "batch axis"),
        (lambda: NeuralODE(FINE, TIMES)(torch.ones(3, 2), torch.ones(3, 2, 1)), "each of 3 trials and 3 steps"),
        (lambda: GlobalNTK(NeuralODE(FINE, TIMES), torch.ones(2, 2), torch.ones(2, 2)), "left out for a neural ODE"),
        (lambda: diagonal_scan(torch.ones(3), torch.ones(2, 4, 2)), "broadcast to the shape"),
        (lambda: diagonal_scan(torch.ones(2), torch.ones(2, 0, 2)), "one step at least"),
        (lambda: diagonal_scan(torch.ones(2), torch.ones(2, 4, 2), torch.ones(2, 4)), "without its time"),
        (lambda: selective_scan(*[torch.ones(1, 2, 3)] * 2, torch.ones(2, 3), torch.ones(1, 2, 2)), "must be"),
        (lambda: S4D(3)(torch.ones(2, 4, 2)), "3 units"),
        (lambda: SelectiveSSM(3, 0), "state_size must be"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained(call, match):
    with pytest.raises(InputError, match=match):
        call()


def test_scans_leave_a_model_as_it_was():
    model, x = seeded(lambda: SelectiveSSM(3, 2), (2, 4, 3))
    before, state = model(x), torch.get_rng_state()
    GlobalNTK(model, x).operator @ torch.ones(2 * 4 * (5 + 3 + 6 + 3), dtype=torch.float64)
    assert model(x).equal(before)
    assert torch.get_rng_state().equal(state)
    assert all(p.grad is None for p in model.parameters())
