"""Data-parallel wrappers: the model inside is measured, and x goes where the wrapper would bring it."""

import pytest
import torch
from torch import nn

import gramscope as gs


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
CALLS = {
    "ntk": lambda model: gs.ntk(model, X),
    "operator": lambda model: gs.ntk_operator(model, X).dense(),
    "capture": lambda model: gs.capture(model, X).outputs,
    "features": lambda model: gs.measures.features(model, X, "0")["0"],
    "agop": lambda model: gs.measures.agop(model, X),
    "global kernel": lambda model: gs.propagators.GlobalNTK(model, X).output.dense(),
    "step": lambda model: gs.explain_step(
        model, X, None, lr=0.1, loss=lambda f, _: f.square().mean()
    ).predicted,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_inputs_on_the_cpu_are_moved_as_data_parallel_does(name):
    """With a GPU in the machine, ``nn.DataParallel`` moves a model to it: the result lies there."""
    wrapped = nn.DataParallel(network())
    device = next(wrapped.parameters()).device
    got, want = CALLS[name](wrapped), CALLS[name](network())
    assert got.device == device
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_last_layer():
    assert gs.measures.last_layer(nn.DataParallel(network()), X) == "2"
