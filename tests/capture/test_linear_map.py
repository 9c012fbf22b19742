"""Products with a Jacobian from a graph, also where the graph of its transpose cannot be differentiated."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import UnsupportedError
from gramscope.capture.linear_map import LinearMap
from gramscope.kernels.kernel_velocity import dntk_velocity, output_curvature
from references.jacobian import reference_jacobian
from zoo import once
from zoo.case import Call

pytestmark = pytest.mark.filterwarnings("ignore:The backward pass of")
TOLERANCE = 1e-12  # float64; both ways sum a few dozen terms in another order


def test_several_outputs_and_inputs_against_the_matrix():
    torch.manual_seed(0)
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outputs = [torch.outer(a, b).sin(), a.exp(), torch.ones(2, dtype=torch.float64)]
    linear_map = LinearMap(outputs, [a, b])
    rows = [torch.autograd.functional.jacobian(lambda a, b: torch.outer(a, b).sin(), (a, b))]
    v = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
    moved = linear_map.jvp(v, 4)
    want = torch.einsum("ijp,kp->kij", rows[0][0], v[0]) + torch.einsum("ijp,kp->kij", rows[0][1], v[1])
    torch.testing.assert_close(moved[0], want, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(moved[1], a.exp() * v[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert not moved[2].any()
    assert not linear_map.slow
    only_b = linear_map.jvp([None, v[1]], 4)
    torch.testing.assert_close(only_b[0], torch.einsum("ijp,kp->kij", rows[0][1], v[1]), rtol=1e-12, atol=1e-12)
    assert not any(part.any() for part in linear_map.jvp([None, None], 4))


def test_complex_inputs_count_as_two_real_ones():
    torch.manual_seed(0)
    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    f = (z**2).real + z.abs()
    v = torch.randn(2, 3, dtype=torch.complex128)
    linear_map = LinearMap([f], [z])
    (moved,) = linear_map.jvp([v], 2)
    step = 1e-6
    for k in range(2):
        ahead, behind = (((z + s * v[k]) ** 2).real + (z + s * v[k]).abs() for s in (step, -step))
        torch.testing.assert_close(moved[k], (ahead - behind) / (2 * step), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(linear_map._by_rows([v])[0], moved, rtol=TOLERANCE, atol=TOLERANCE)
    assert not linear_map.slow


@pytest.mark.parametrize("name", once.CASES)
def test_steps_are_explained_where_backward_passes_cannot_be_differentiated(name):
    model, x, _ = once.CASES[name].build()
    step = gs.explain_step(model, x, torch.zeros(3, 2, dtype=torch.float64), lr=1e-6)
    exact = reference_jacobian(model, x)
    want = sum(torch.einsum("nc...,...->nc", exact[key], change) for key, change in step.parts.change.items())
    torch.testing.assert_close(step.predicted, want, rtol=1e-9, atol=1e-12 * float(want.norm()))
    assert any("plain backward passes" in note for note in step.notes)


@pytest.mark.parametrize("name", once.CASES)
def test_agop_operators(name):
    model, x, _ = once.CASES[name].build()
    want = gs.measures.agop(model, x)
    got = gs.measures.agop_operator(model, x).dense()
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * float(want.norm()))


@pytest.mark.parametrize("name", [name for name in once.CASES if hasattr(once.CASES[name].build()[0], "a")])
def test_transports(name):
    """From a layer to the outputs, against one backward pass an output, also after the model was trained on."""
    model, x, _ = once.CASES[name].build()
    inner = model.a(x).detach().requires_grad_()
    handle = model.a.register_forward_hook(lambda *_: inner)
    f = model(x)
    handle.remove()
    rows = [torch.autograd.grad(value, inner, retain_graph=True)[0].reshape(-1) for value in f.flatten()]
    transport = gs.hierarchy.Transport(model, x, "a", "b")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(transport.dense(), torch.stack(rows), rtol=0, atol=1e-12)
    torch.testing.assert_close(transport.T.dense().T, torch.stack(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["detached_tanh", "once_differentiable_tanh", "numpy_tanh"])
def test_pullbacks(name):
    """A network with a custom tanh has the pullback of the same network with torch's."""
    model, x, _ = once.CASES[name].build()
    plain = Call(lambda m, x: m.b(m.a(x).tanh()), a=model.a, b=model.b)
    got, want = (gs.hierarchy.NetworkPullback(m, x, "a").dense() for m in (model, plain))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * float(want.norm()))


@pytest.mark.parametrize(("name", "parameter"), [("detached_linear", "w"), ("adjoint_solver", "w")])
def test_a_pullback_needs_to_see_its_weights(name, parameter):
    model, x, _ = once.CASES[name].build()
    with pytest.raises(UnsupportedError, match=f"parameter '{parameter}' does so inside the custom"):
        gs.hierarchy.NetworkPullback(model, x, "a")
    gs.hierarchy.NetworkPullback(model, x, "b")  # nothing above this layer


@pytest.mark.parametrize("name", once.CASES)
def test_the_global_kernel(name):
    model, x, _ = once.CASES[name].build()
    want = gs.ntk(model, x).reshape(6, 6)
    got = gs.propagators.GlobalNTK(model, x).output.dense()
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * float(want.norm()))


@pytest.mark.parametrize("name", once.CASES)
def test_second_derivatives_are_refused_by_name(name):
    model, x, _ = once.CASES[name].build()
    with pytest.raises(UnsupportedError, match="second derivative"):
        dntk_velocity(model, x, torch.ones(3, 2, dtype=torch.float64))


class ConstantSlope(torch.autograd.Function):
    """The slope is saved as a number: the first derivative is right, the second is zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(1 - x.tanh() ** 2)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class RightSlope(ConstantSlope):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_custom_function_whose_second_derivative_is_wrong_is_refused(dtype):
    torch.manual_seed(0)
    a, b, x = nn.Linear(3, 5), nn.Linear(5, 2), torch.randn(4, 3, dtype=dtype)
    residual = torch.ones(4, 2, dtype=dtype)
    wrong, right, plain = (
        Call(lambda m, x, f=f: m.b(f(m.a(x))), a=a, b=b).to(dtype)
        for f in (ConstantSlope.apply, RightSlope.apply, torch.tanh)
    )
    with pytest.raises(UnsupportedError, match="not the derivative of its first"):
        output_curvature(wrong, x, residual)
    got, want = output_curvature(right, x, residual), output_curvature(plain, x, residual)
    torch.testing.assert_close(got, want)


def test_out_of_memory_is_no_reason_for_the_slow_way(monkeypatch):
    """A slow path hides nothing: memory that is not there is said at once."""
    a = torch.randn(3, requires_grad=True)
    linear_map = LinearMap([a.sin()], [a])

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.autograd, "grad", full)
    with pytest.raises(torch.OutOfMemoryError):
        linear_map.vjp([torch.ones(2, 3)])


def test_a_large_map_in_float32_is_not_taken_for_one_without_second_derivative():
    rng = torch.Generator().manual_seed(0)
    leaf, w = (torch.rand(8, 2**19, generator=rng) for _ in range(2))
    product = LinearMap([(leaf.requires_grad_() * w).sum(1)], [leaf])
    product.jvp([torch.ones(1, 8, 2**19)], 1)
    assert product.slow == ""
