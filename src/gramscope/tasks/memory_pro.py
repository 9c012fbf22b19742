"""Memory-pro: remember the direction of a stimulus through a delay, then report it."""

import torch

from gramscope.tasks.sequences import SequenceTask
from gramscope.tasks.sizes import require_at_least, require_positive


def memory_pro(
    trials: int = 20,
    *,
    seed: int = 0,
    fixation: int = 10,
    stimulus: int = 20,
    delay: int = 30,
    response: int = 20,
    noise: float = 0.0,
) -> SequenceTask:
    """Trials of memory-pro (Yang et al., Nat. Neurosci. 22, 2019; Driscoll et al., Nat. Neurosci. 27, 2024).

    Three inputs: a fixation signal, on until the response, and cos θ, sin θ while the stimulus lasts. Three outputs:
    the fixation signal, and cos θ, sin θ during the response. Angles are spaced evenly round the circle from a random
    start; ``noise`` is the standard deviation of noise on the inputs.

    >>> task = memory_pro(4, seed=0)
    >>> task.x.shape, task.y.shape, bool(task.mask.all())
    (torch.Size([4, 80, 3]), torch.Size([4, 80, 3]), True)
    """
    require_positive(trials=trials, stimulus=stimulus, response=response)
    require_at_least(0, fixation=fixation, delay=delay)
    rng = torch.Generator().manual_seed(seed)
    start = float(torch.rand((), generator=rng, device="cpu"))
    angles = 2 * torch.pi * (torch.arange(trials, device="cpu") / trials + start)
    direction = torch.stack([angles.cos(), angles.sin()], dim=1)[:, None]
    steps = fixation + stimulus + delay + response
    x, y = torch.zeros(trials, steps, 3, device="cpu"), torch.zeros(trials, steps, 3, device="cpu")
    x[:, : steps - response, 0] = y[:, : steps - response, 0] = 1.0
    x[:, fixation : fixation + stimulus, 1:] = direction
    y[:, steps - response :, 1:] = direction
    if noise:
        x += noise * torch.randn(x.shape, generator=rng, device="cpu")
    return SequenceTask(x, y, torch.ones(trials, steps, dtype=torch.bool, device="cpu"))
