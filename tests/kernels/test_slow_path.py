"""Parameters that go one example at a time are named, with the time they took, where that is long."""

import importlib
import warnings

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.user_warnings import SlowPathWarning


class Unknown(nn.Module):
    """A weight that meets each example in an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.last = nn.Parameter(torch.rand(3) + 0.5), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.logaddexp(x, self.gain))


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(importlib.import_module("gramscope.kernels.empirical_ntk"), "LONG", 0.0)


def test_the_parameter_is_named_with_its_time(at_once):
    with pytest.warns(SlowPathWarning, match=r"1 parameters \(gain\) .* of \d+\.\d seconds") as seen:
        gs.ntk(Unknown(), torch.randn(4, 3))
    assert seen[0].filename == __file__


def test_between_two_batches_too(at_once):
    with pytest.warns(SlowPathWarning, match="gain"):
        gs.ntk(Unknown(), torch.randn(4, 3), torch.randn(2, 3))


def test_silence_where_every_parameter_has_a_rule(at_once):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.ntk(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 3))


def test_silence_where_it_took_no_time():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.ntk(Unknown(), torch.randn(4, 3))
