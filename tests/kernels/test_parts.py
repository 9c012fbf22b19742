"""Capture in parts gives the kernel of a capture at once, on every network of the zoo, on the tape and off it."""

from functools import partial

import pytest
import torch

import gramscope as gs
from cases import CASES
from gramscope.capture.capture import captured_by_example
from gramscope.kernels.memory import make_plan
from gramscope.kernels.ntk import contracted
from gramscope.kernels.parts import capture_in_parts

# Its batch has a fixed size, so that no part of it can be taken; the plan then asks for none (test below).
FIXED = "flattened_token_major_square"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.n > 1 and name != FIXED])
def test_parts_give_what_the_whole_gives(name):
    """Parts of two examples, the last maybe of one, so that parts of unequal size are joined."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=torch.float64)
    options = {"outputs": case.outputs, "frozen": False, "precision": None}
    take, opened = partial(gs.capture, model, **options), partial(captured_by_example, model, **options)
    for trace in (False, True):
        whole = contracted(take(x), trace=trace, by_site=True)
        joined = contracted(capture_in_parts(take, opened, x, case.n, 2, trace), trace=trace, by_site=True)
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
