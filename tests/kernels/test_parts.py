"""Capture in parts gives the kernel of a capture at once, on every network of the zoo, on the tape and off it."""

import pytest
import torch

import gramscope as gs
from cases import CASES
from gramscope.kernels.memory import make_plan
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
