"""Capture in parts gives the kernel of a capture at once, on every network of the zoo, on the tape and off it.

So does a capture from the forward pass that tells its size.
"""

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES
from gramscope.kernels import memory
from gramscope.kernels.memory import is_small, make_plan
from gramscope.kernels.ntk import contracted
from in_parts import FIXED, IN_PARTS, snapshot_in_parts


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_give_what_the_whole_gives(name):
    """Parts of two examples, the last maybe of one, so that parts of unequal size are joined."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=torch.float64)
    options = {"outputs": case.outputs, "frozen": False, "precision": None}
    for trace in (False, True):
        whole = contracted(gs.capture(model, x, **options), trace=trace, by_site=True)
        joined = contracted(snapshot_in_parts(model, x, case.n, 2, trace=trace, **options), trace=trace, by_site=True)
        assert list(joined) == list(whole)
        scale = max(float(kernel.abs().max()) for kernel in whole.values())
        for parameter, kernel in whole.items():
            # The order of sums differs with the size of a part; networks that round to float32 inside differ by that.
            torch.testing.assert_close(joined[parameter], kernel, rtol=1e-10, atol=1e-12 * scale)


def test_a_batch_of_fixed_size_is_not_cut():
    model, x, _ = CASES[FIXED].build(dtype=torch.float64)
    options = {"outputs": CASES[FIXED].outputs, "frozen": False, "precision": None}
    plan = make_plan(model, x, None, trace=False, blocked=True, memory=None, **options)
    assert plan.part is None
    assert len(plan.rows) == 1


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_size_asked_beforehand_gives_the_same(name, monkeypatch):
    """Small work is captured from the forward pass that tells its size, larger work after a look at two examples."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=torch.float64)
    for reduce in ("none", "trace"):
        at_once = gs.ntk(model, x, reduce=reduce, outputs=case.outputs)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "SMALL_INPUT", 0)
            kernel = gs.ntk(model, x, reduce=reduce, outputs=case.outputs)
        torch.testing.assert_close(kernel, at_once, rtol=1e-10, atol=1e-12 * float(at_once.abs().max()))


def test_small_work_takes_one_forward_pass():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x)

    model = Counting(6, 2)
    gs.ntk(model, torch.randn(5, 6))
    assert Counting.calls == 1
    Counting.calls = 0
    gs.ntk(model, torch.randn(5, 6), memory=2**30)
    assert Counting.calls == 2


def test_what_is_small():
    model = nn.Linear(2, 2)
    assert is_small(model, torch.ones(4, 2))
    assert not is_small(model, torch.ones(memory.SMALL_INPUT + 1, 1))
    assert is_small(model, torch.ones(memory.SMALL_INPUT // memory.ID, 1, dtype=torch.int64))
    assert not is_small(model, torch.ones(memory.SMALL_INPUT // memory.ID + 1, 1, dtype=torch.int64))
    assert not is_small(nn.Linear(2, memory.SMALL_MODEL // 2, device="meta"), torch.ones(4, 2))
    assert not is_small(model, torch.ones(0, 2))
