"""Tasks in time: the flip-flop, the line attractor, the memory-pro task and running parity, each made from a seed."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gramscope.base.checks import check_counts, check_number, is_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import generator


@dataclass(frozen=True, repr=False)
class SequenceTask(Result):
    """Trials of a task in time: inputs, wanted outputs, and where outputs count (``mask``, True where they do)."""

    x: Float[Tensor, "trial time i"]
    y: Float[Tensor, "trial time o"]
    mask: Bool[Tensor, "trial time"]

    def loss(self, outputs: Float[Tensor, "trial time o"]) -> Float[Tensor, ""]:
        """Mean squared error over the entries that count."""
        error = ((outputs - self.y.to(outputs)) ** 2).mean(dim=2)
        return (error * self.mask.to(error)).sum() / self.mask.sum()


def direction(angle: Float[Tensor, " trial"]) -> Float[Tensor, "trial 1 2"]:
    """cos and sin, the same at all steps."""
    return torch.stack([angle.cos(), angle.sin()], dim=1)[:, None]


def fixated(trials: int, steps: int, response: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Empty inputs and outputs but for the fixation signal, which is on until the response."""
    x, y = (torch.zeros(trials, steps, width, device="cpu") for width in (inputs, outputs))
    x[:, : steps - response, 0] = y[:, : steps - response, 0] = 1.0
    return x, y


def noisy_task(x: Tensor, y: Tensor, noise: float, rng: torch.Generator) -> SequenceTask:
    """All steps count; ``noise`` is the standard deviation of noise on the inputs."""
    if check_number(noise, "noise", least=0.0):
        x = x + noise * torch.randn(x.shape, generator=rng, device="cpu")
    return SequenceTask(x, y, torch.ones(x.shape[:2], dtype=torch.bool, device="cpu"))


def flip_flop(trials: int = 32, *, seed: int = 0, steps: int = 60, bits: int = 3, rate: float = 0.1) -> SequenceTask:
    """Trials of the flip-flop with ``bits`` channels (Sussillo & Barak, Neural Comput. 25, 2013).

    At each step each input is +1 or -1 with probability ``rate / 2`` each, else 0; the output is the last pulse seen.
    The first step has a pulse on every channel, so that the wanted output is always defined.

    >>> task = flip_flop(2, steps=5, bits=1, seed=1)
    >>> task.y.abs().unique().tolist()
    [1.0]
    """
    check_counts(1, trials=trials, steps=steps, bits=bits)
    if not (is_number(rate) and 0 <= rate <= 1):
        raise InputError(f"rate must be a probability between 0 and 1, got {rate}.")
    rng = generator(seed)
    signs = 2.0 * torch.randint(0, 2, (trials, steps, bits), generator=rng, device="cpu") - 1
    pulses = torch.rand(trials, steps, bits, generator=rng, device="cpu") < rate
    pulses[:, 0] = True
    x = signs * pulses
    last = torch.where(pulses, torch.arange(steps, device="cpu")[None, :, None], -1).cummax(dim=1).values
    return SequenceTask(x, x.gather(1, last), torch.ones(trials, steps, dtype=torch.bool, device="cpu"))


def line_attractor(trials: int = 32, *, seed: int = 0, steps: int = 50, scale: float = 0.2) -> SequenceTask:
    """Trials of perfect integration: the output is the running sum of a Gaussian input of standard deviation ``scale``.

    >>> task = line_attractor(3, steps=4)
    >>> bool(torch.allclose(task.y[:, -1], task.x.sum(dim=1)))
    True
    """
    check_counts(1, trials=trials, steps=steps)
    rng = generator(seed)
    x = scale * torch.randn(trials, steps, 1, generator=rng, device="cpu")
    return SequenceTask(x, x.cumsum(dim=1), torch.ones(trials, steps, dtype=torch.bool, device="cpu"))


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
    check_counts(1, trials=trials, stimulus=stimulus, response=response)
    check_counts(0, fixation=fixation, delay=delay)
    rng = generator(seed)
    start = float(torch.rand((), generator=rng, device="cpu"))
    angles = 2 * torch.pi * (torch.arange(trials, device="cpu") / trials + start)
    steps = fixation + stimulus + delay + response
    x, y = fixated(trials, steps, response, 3, 3)
    x[:, fixation : fixation + stimulus, 1:] = y[:, steps - response :, 1:] = direction(angles)
    return noisy_task(x, y, noise, rng)


def parity(trials: int = 64, *, seed: int = 0, steps: int = 12, every_step: bool = True) -> SequenceTask:
    """Bits ±1 in, the product of all bits so far out; ``every_step=False`` asks for the last step's alone.

    >>> task = parity(5, steps=6)
    >>> bool((task.y[:, -1] == task.x.prod(dim=1)).all())
    True
    """
    check_counts(1, trials=trials, steps=steps)
    rng = generator(seed)
    x = 2.0 * torch.randint(0, 2, (trials, steps, 1), generator=rng, device="cpu") - 1
    mask = torch.ones(trials, steps, dtype=torch.bool, device="cpu")
    if not every_step:
        mask[:, :-1] = False
    return SequenceTask(x, x.cumprod(dim=1), mask)
