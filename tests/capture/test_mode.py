"""One rule for train and eval mode: kernels are those of the model as it stands, and randomness is said."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import UnsupportedError
from gramscope.base.user_warnings import RandomOutputsWarning
from gramscope.kernels.kernel_velocity import output_curvature

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def dropping(training):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).train(training)


CALLS = {
    "ntk": lambda m: gs.ntk(m, X),
    "kernel": lambda m: gs.kernel(m, X),
    "capture": lambda m: gs.capture(m, X),
    "operator": lambda m: gs.ntk_operator(m, X),
    "curvature": lambda m: output_curvature(m, X, torch.ones(5, 2)),
    "transport": lambda m: gs.hierarchy.Transport(m, X, "0", "3"),
    "pullback": lambda m: gs.hierarchy.NetworkPullback(m, X, "0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_dropout_in_training_mode_is_said(name):
    with pytest.warns(RandomOutputsWarning, match="call model.eval"):
        CALLS[name](dropping(True))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_model_that_draws_nothing_is_measured_in_silence(name):
    CALLS[name](dropping(False))
    CALLS[name](nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 2)).train())


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_step_is_taken_in_training_mode_and_measures_are_not():
    gs.explain_step(dropping(True), X, torch.zeros(5, 2), lr=0.1)
    gs.measures.layer_target_linearity(dropping(True), X, torch.randn(5, 1))


@pytest.mark.parametrize("call", [gs.ntk, gs.capture, gs.ntk_operator])
def test_a_quantised_layer_on_the_way_is_refused(call):
    """Gradients do not pass it: what lies before it would count as zero, without an error from torch."""
    inner = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2))
    with pytest.raises(UnsupportedError, match="quantised"):
        call(model, X)
