"""The line attractor: integrate a stream of evidence."""

import torch

from gramscope.tasks.sequences import SequenceTask
from gramscope.tasks.sizes import require_positive


def line_attractor(trials: int = 32, *, seed: int = 0, steps: int = 50, scale: float = 0.2) -> SequenceTask:
    """Trials of perfect integration: the output is the running sum of a Gaussian input of standard deviation ``scale``.

    >>> task = line_attractor(3, steps=4)
    >>> bool(torch.allclose(task.y[:, -1], task.x.sum(dim=1)))
    True
    """
    require_positive(trials=trials, steps=steps)
    rng = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(trials, steps, 1, generator=rng, device="cpu")
    return SequenceTask(x, x.cumsum(dim=1), torch.ones(trials, steps, dtype=torch.bool, device="cpu"))
