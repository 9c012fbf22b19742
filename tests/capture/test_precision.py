"""In which dtype a network is measured."""

import inspect

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.capture.capturing import capture

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).eval().to(dtype)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("own", [torch.float64, torch.float32, torch.bfloat16])
def test_a_copy_runs_where_the_dtype_asked_for_is_another(own, precision):
    model, x = network(own), torch.randn(5, 3, dtype=own)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    asked = network(own).to(DTYPES[precision])
    for measure in (gs.ntk, lambda *a, **o: gs.ntk_operator(*a, **o).dense()):
        found = measure(model, x, precision=precision)
        assert found.dtype == DTYPES[precision]
        torch.testing.assert_close(found, measure(asked, x.to(found.dtype)), rtol=0, atol=0)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_buffers_of_another_dtype_are_brought_along():
    model, x = network(torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = gs.ntk(model, x)
    model[1].float()
    for parameter in model[1].parameters():
        parameter.data = parameter.data.double()  # now only the statistics are float32
    torch.testing.assert_close(gs.ntk(model, x, precision="float64"), expected, rtol=1e-6, atol=1e-7)


class CastsInside(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x).float())


@pytest.mark.parametrize(
    "measure",
    [gs.ntk, gs.ntk_operator, gs.linearize, gs.capture, lambda m, x, **o: gs.explain_step(m, x, x, lr=1.0, **o)],
)
def test_a_model_that_casts_inside_is_told_so(measure):
    model = CastsInside(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(gs.InputError, match=r"must compute in the dtype of its parameters, torch.float64.*precision="):
        measure(model, torch.randn(4, 3), precision="float64")


def test_the_room_has_the_signature_of_its_entry_point():
    assert inspect.signature(gs.capture) == inspect.signature(capture)


def test_one_number_is_a_metric():
    model, x = network(torch.float64), torch.randn(4, 3, dtype=torch.float64)
    plain, doubled = (gs.ntk_operator(model, x, metric=metric).dense() for metric in (None, 2.0))
    torch.testing.assert_close(doubled, 2 * plain)
