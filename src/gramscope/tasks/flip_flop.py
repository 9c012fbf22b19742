"""The flip-flop: each output holds the sign of the last pulse on its input."""

import torch

from gramscope.tasks.sequences import SequenceTask
from gramscope.tasks.sizes import require_positive


def flip_flop(trials: int = 32, *, seed: int = 0, steps: int = 60, bits: int = 3, rate: float = 0.1) -> SequenceTask:
    """Trials of the flip-flop with ``bits`` channels (Sussillo & Barak, Neural Comput. 25, 2013).

    At each step each input is +1 or -1 with probability ``rate / 2`` each, else 0; the output is the last pulse seen.
    The first step has a pulse on every channel, so that the wanted output is always defined.

    >>> task = flip_flop(2, steps=5, bits=1, seed=1)
    >>> task.y.abs().unique().tolist()
    [1.0]
    """
    require_positive(trials=trials, steps=steps, bits=bits)
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be a probability between 0 and 1, got {rate}.")
    rng = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (trials, steps, bits), generator=rng, device="cpu") - 1
    pulses = torch.rand(trials, steps, bits, generator=rng, device="cpu") < rate
    pulses[:, 0] = True
    x = signs * pulses
    last = torch.where(pulses, torch.arange(steps, device="cpu")[None, :, None], -1).cummax(dim=1).values
    return SequenceTask(x, x.gather(1, last), torch.ones(trials, steps, dtype=torch.bool, device="cpu"))
