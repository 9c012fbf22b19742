"""The Hessian and its greatest eigenvalue against second derivatives entry by entry."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from conformance import assert_operator_conforms
from gramscope.base.errors import InputError
from references import training as reference


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(dtype)
    return model, torch.randn(7, 2, dtype=dtype), torch.arange(7) % 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hessian_products(dtype):
    model, x, y = problem(dtype)
    operator = gs.measures.HessianOperator(F.cross_entropy(model(x), y), list(model.parameters()))
    assert_operator_conforms(operator, reference.hessian(model, x, y, F.cross_entropy))


def test_a_parameter_that_the_loss_does_not_see_has_no_curvature():
    model, x, y = problem()
    unseen = nn.Parameter(torch.ones(2, dtype=torch.float64))
    operator = gs.measures.HessianOperator(F.cross_entropy(model(x), y), [*model.parameters(), unseen])
    dense = operator.dense()
    assert not dense[-2:].any()
    torch.testing.assert_close(dense[:-2, :-2], reference.hessian(model, x, y, F.cross_entropy))


def test_enough_steps_find_the_eigenvalue():
    model, x, y = problem()
    top = float(torch.linalg.eigvalsh(reference.hessian(model, x, y, F.cross_entropy))[-1])
    loss = F.cross_entropy(model(x), y)
    found = [gs.measures.sharpness(loss, list(model.parameters()), steps=steps) for steps in (1, 4, 12)]
    assert found[0].value < found[1].value <= top * (1 + 1e-12), "Ritz values grow towards it"
    assert found[2].value == pytest.approx(top, rel=1e-10)
    assert [one.products for one in found[:2]] == [1, 4]
    assert all(one.error >= 0 for one in found)


def test_a_linear_loss_has_no_curvature():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert gs.measures.sharpness(weight.sum(), [weight]).value == 0.0


def test_frozen_parameters_are_refused():
    with pytest.raises(InputError, match="requires_grad"):
        gs.measures.sharpness(torch.zeros(()), [torch.zeros(3)])


def test_a_parameter_of_one_number():
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    operator = gs.measures.HessianOperator(scale**2 * weight.square().sum(), [scale, weight])
    assert operator.dense().tolist() == [[4.0, 8.0, 8.0], [8.0, 8.0, 0.0], [8.0, 0.0, 8.0]]
