"""One record for each torch operation: every spelling has it, and definitions give torch's own values."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope.ops.kinks import FixedSides, Sides, TwiceDifferentiable
from gramscope.ops.operations import OPERATIONS

SPELLINGS = {
    "relu": (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    "clamp": (torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_),
    "max": (torch.max, Tensor.max),
    "max_pool2d": (F.max_pool2d, torch.max_pool2d, F.max_pool2d_with_indices),
    "prelu": (F.prelu, torch.prelu, Tensor.prelu),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_an_operation_has_its_record(name):
    for function in SPELLINGS[name]:
        assert OPERATIONS[function].name.rstrip("_").removesuffix("_with_indices") == name
        assert OPERATIONS[function].as_ramps is not None


torch.manual_seed(0)
IMAGE, ROWS = torch.randn(4, 6, 5, 5).double(), torch.randn(4, 3, 6).double()
GAIN, BIAS = torch.randn(6).double(), torch.randn(6).double()
MEAN, VARIANCE = torch.randn(6).double(), torch.rand(6).double() + 0.5
IDS, TABLE = torch.tensor([[1, 2, 2], [0, 6, 1]]), torch.randn(7, 3).double()
LSTM = nn.LSTM(6, 4, num_layers=2, bidirectional=True, proj_size=3, batch_first=True).double()
DEFINED = {
    "layer_norm": lambda: F.layer_norm(ROWS, (6,), GAIN, BIAS),
    "weight norm": lambda: torch._weight_norm(IMAGE, IMAGE[:, :1, :1, :1].cos(), 0),
    "rms_norm": lambda: F.rms_norm(ROWS, (6,), GAIN),
    "group_norm": lambda: F.group_norm(IMAGE, 3, GAIN, BIAS),
    "batch_norm": lambda: F.batch_norm(IMAGE, MEAN, VARIANCE, GAIN, BIAS),
    "batch_norm in training": lambda: F.batch_norm(IMAGE, None, None, GAIN, BIAS, training=True),
    "instance_norm": lambda: F.instance_norm(IMAGE, weight=GAIN, bias=BIAS),
    "embedding_bag mean": lambda: F.embedding_bag(IDS, TABLE, padding_idx=2),
    "embedding_bag max": lambda: F.embedding_bag(IDS, TABLE, mode="max"),
    "embedding_bag offsets": lambda: F.embedding_bag(IDS.flatten(), TABLE, torch.tensor([0, 2, 2]), mode="sum"),
    "hardsigmoid": lambda: F.hardsigmoid(3 * ROWS),
    "lstm": lambda: LSTM(ROWS)[0],
    "gru cell": lambda: torch.gru_cell(ROWS[0], MEAN.expand(3, 6), *(torch.ones(18, 6).double() / 7,) * 2),
}


@pytest.mark.parametrize("name", DEFINED)
def test_definitions_give_the_values_of_torch(name):
    want = DEFINED[name]()
    with TwiceDifferentiable():
        got = DEFINED[name]()
    assert got is not want
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_a_network_that_runs_other_operations_has_no_counterpart():
    z = torch.randn(5, requires_grad=True)
    with Sides() as watched:
        F.relu(z)
    with pytest.raises(gs.InputError, match="abs has no counterpart"), FixedSides(watched.sides):
        torch.abs(z)
