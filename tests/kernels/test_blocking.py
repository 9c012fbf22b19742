"""Blocks: the same kernel under any budget, and the budget kept."""

import re

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import CoupledExamplesError, InputError
from references.counting import LivePeak


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 32),
        nn.Tanh(), nn.Linear(32, 5),
    ).double()  # fmt: skip


@pytest.mark.parametrize("reduce", ["none", "trace"])
@pytest.mark.parametrize("budget", [12e6, 6e6, 3e6])
def test_the_peak_stays_within_the_budget(reduce, budget):
    model, x = network(), torch.randn(40, 2, 8, 8, dtype=torch.float64)
    whole = gs.ntk(model, x, reduce=reduce)
    with LivePeak() as memory:
        blocked = gs.ntk(model, x, reduce=reduce, memory=int(budget))
    assert memory.peak <= budget
    # Blocking changes the order of no sum within one pair of examples, so only the rounding of the products differs.
    torch.testing.assert_close(blocked, whole, rtol=1e-12, atol=1e-12)


def test_more_memory_means_fewer_blocks():
    model, x = network(), torch.randn(40, 2, 8, 8, dtype=torch.float64)
    with LivePeak() as small:
        gs.ntk(model, x, memory=3_000_000)
    with LivePeak() as large:
        gs.ntk(model, x, memory=300_000_000)
    assert small.peak < large.peak


def test_a_budget_below_the_kernel_itself_is_refused():
    with pytest.raises(InputError, match=r"memory must be at least [\d,]+ bytes.*ntk_operator"):
        gs.ntk(network(), torch.randn(40, 2, 8, 8, dtype=torch.float64), memory=1000)


@pytest.mark.parametrize("memory", [0, -5, 1.5, "lots", True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises((InputError, TypeError)):
        gs.ntk(nn.Linear(2, 1), torch.randn(3, 2), memory=memory)


def test_a_symmetric_kernel_is_symmetric_to_the_last_bit():
    model, x = network().float(), torch.randn(23, 2, 8, 8)
    matrix = gs.ntk(model, x).reshape(23 * 5, -1)
    assert torch.equal(matrix, matrix.T)


class OverTheBatch(nn.Module):
    """Each example is compared with the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.net(x)
        return (hidden - hidden.mean(0)) ** 2


def test_coupled_examples_are_found_out_even_one_by_one():
    x = torch.randn(6, 4)
    with pytest.raises(CoupledExamplesError, match="mix the 6 examples"):
        gs.ntk(OverTheBatch(), x)
    with pytest.raises(CoupledExamplesError, match="mix the 6 examples"):
        gs.ntk(OverTheBatch(), x, memory=6 * 6 * 9 * 4)  # the kernel alone


class ByPlace(nn.Module):
    """Each example is scaled by its place in the batch: no example depends on another, and a part is not the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x):
        return self.net(x) * torch.arange(1, 1 + len(x))[:, None]


def test_outputs_that_depend_on_the_batch_are_found_out():
    x = torch.randn(6, 4)
    with pytest.raises(InputError) as refused:
        gs.ntk(ByPlace(), x, memory=6 * 6 * 9 * 4)  # the kernel alone
    smallest = int(re.search(r"at least ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))
    with pytest.raises(CoupledExamplesError, match="depend on the other examples in the batch"):
        gs.ntk(ByPlace(), x, memory=smallest)
