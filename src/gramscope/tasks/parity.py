"""Parity of a stream of bits."""

import torch

from gramscope.tasks.sequences import SequenceTask
from gramscope.tasks.sizes import require_positive


def parity(trials: int = 64, *, seed: int = 0, steps: int = 12, every_step: bool = True) -> SequenceTask:
    """Bits ±1 in, the product of all bits so far out; ``every_step=False`` asks for the last step's alone.

    >>> task = parity(5, steps=6)
    >>> bool((task.y[:, -1] == task.x.prod(dim=1)).all())
    True
    """
    require_positive(trials=trials, steps=steps)
    rng = torch.Generator().manual_seed(seed)
    x = 2.0 * torch.randint(0, 2, (trials, steps, 1), generator=rng, device="cpu") - 1
    mask = torch.ones(trials, steps, dtype=torch.bool, device="cpu")
    if not every_step:
        mask[:, :-1] = False
    return SequenceTask(x, x.cumprod(dim=1), mask)
