"""Capture in parts, as ``gs.ntk`` does it on a CPU, for tests of what comes of it."""

from functools import partial

import gramscope as gs
from cases import CASES
from gramscope.capture.capture import captured_by_example
from gramscope.kernels.parts import capture_in_parts

# Its batch has a fixed size, so that no part of it can be taken; the plan then asks for none (test_parts).
FIXED = "flattened_token_major_square"
IN_PARTS = [name for name, case in CASES.items() if case.n > 1 and name != FIXED]


def snapshot_in_parts(model, x, n, size, *, trace, **options):
    """All n examples, ``size`` at a time."""
    take, opened = partial(gs.capture, model, **options), partial(captured_by_example, model, **options)
    return capture_in_parts(take, opened, x, n, size, trace)
