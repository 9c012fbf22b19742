"""The linearised network and kernel gradient flow against brute force in float64."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError

F64 = torch.float64


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    first = nn.Linear(3, 5)
    # The weight of the first layer is used twice.
    tied = nn.Sequential(first, nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), first, nn.Tanh(), nn.Linear(5, 2)).double()
    return tied, torch.randn(4, 3, dtype=F64)


def jacobian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model = deepcopy(model)  # torch's functional_call leaves tensors in a module that is used twice
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    return torch.cat([part.reshape(x.shape[0] * 2, -1) for part in found.values()], dim=1)


def test_outputs_at_other_parameters_are_a_taylor_expansion() -> None:
    model, x = network()
    linear = gs.linearize(model, x)
    start, rows = model(x).detach(), jacobian(model, x)
    old = torch.cat([p.detach().flatten() for p in model.parameters()])
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    new = torch.cat([p.detach().flatten() for p in model.parameters()])
    wanted = start + (rows @ (new - old)).reshape(4, 2)
    # Rounding of one product in float64.
    torch.testing.assert_close(linear(model), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear(dict(model.named_parameters())), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear.change(new - old), wanted - start, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear.outputs, start, rtol=0, atol=0)
    torch.testing.assert_close(linear.jacobian.dense(), rows, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(linear(model), model(x), rtol=1e-3)
    only = {"6.bias": torch.ones(2, dtype=F64)}
    torch.testing.assert_close(linear(only), start + (1 - linear.parameters["6.bias"]), rtol=1e-12, atol=1e-12)
    assert repr(linear) == f"LinearizedModel(4 examples, 2 outputs, {len(old)} parameters)"


def test_wrong_parameters_are_named() -> None:
    model, x = network()
    linear = gs.linearize(model, x)
    with pytest.raises(InputError, match="step: no parameter is called 'nothing'"):
        linear.change({"nothing": torch.ones(2)})
    with pytest.raises(InputError, match="'nothing' of shape"):
        linear({"nothing": torch.ones(2)})
    with pytest.raises(InputError, match="shape \\(2,\\) there"):
        linear({"6.bias": torch.ones(3)})


def test_flow_is_what_small_steps_of_the_linear_model_make() -> None:
    """Gradient descent on the linearised network, in the parameters, step by step; and its limits."""
    model, x = network()
    torch.manual_seed(1)
    x2, y = torch.randn(3, 3, dtype=F64), torch.randn(4, 2, dtype=F64)
    rows, rows2 = jacobian(model, x), jacobian(model, x2)
    f0, g0 = model(x).detach().flatten(), model(x2).detach().flatten()
    kernel, cross = gs.kernel(model, x), gs.kernel(model, x2, x)
    lr, steps = 1e-4, 4000
    theta = torch.zeros(rows.shape[1], dtype=F64)
    for _ in range(steps):
        theta -= lr * rows.T @ (f0 + rows @ theta - y.flatten())
    residual = y - f0.reshape(4, 2)
    found = kernel.predict(cross, residual, t=lr * steps)
    # Euler steps of 1e-4 differ from the flow by lr λ_max / 2, a few times 1e-3 of the whole.
    torch.testing.assert_close(found.flatten(), rows2 @ theta, rtol=0, atol=5e-3 * float(found.abs().max()))
    exact = torch.matrix_exp(-kernel.matrix * 0.4)
    solved = torch.linalg.pinv(kernel.matrix, rcond=1e-12, hermitian=True) @ (
        residual.flatten() - exact @ residual.flatten()
    )
    torch.testing.assert_close(found.flatten(), cross.matrix @ solved, rtol=1e-8, atol=1e-8)
    # At t = 0 nothing has moved; for long times it is kernel regression; g0 is added by the caller.
    times = torch.tensor([0.0, 0.4, torch.inf])
    many = kernel.predict(cross, residual, t=times)
    assert many.shape == (3, 3, 2)
    assert not many[0].any()
    torch.testing.assert_close(many[1], found, rtol=1e-6, atol=1e-7)  # 0.4 was float32
    torch.testing.assert_close(many[2], kernel.predict(cross, residual), rtol=1e-7, atol=1e-9)
    assert g0.shape == (6,)


def test_flow_with_a_ridge_and_of_a_singular_kernel() -> None:
    kernel = gs.Kernel(torch.diag(torch.tensor([2.0, 0.0], dtype=F64)))
    y = torch.ones(2, 1, dtype=F64)
    found = kernel.predict(kernel, y, t=0.5)
    assert found.flatten().tolist() == pytest.approx([1 - torch.e**-1.0, 0.0])
    decayed = kernel.predict(kernel, y, ridge=1.0, t=1e3)
    torch.testing.assert_close(decayed, kernel.predict(kernel, y, ridge=1.0), rtol=1e-12, atol=1e-12)
    for bad in (-1.0, float("nan")):
        with pytest.raises(InputError, match="t must be a time of at least 0"):
            kernel.predict(kernel, y, t=bad)
    assert repr(kernel) == "Kernel 2 x 2, 0 sites, trace 2"
