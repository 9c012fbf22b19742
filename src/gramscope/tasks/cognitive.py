"""Tasks in time from experiments on working memory, decisions and timing, each made from a seed.

All have the fixation signal first among inputs and outputs (but the n-back, which has none): it is on until the answer
is due. What is asked for, and where it counts, is said for each.
"""

import torch
from torch import Tensor

from gramscope.base.checks import check_counts, check_number
from gramscope.base.errors import InputError
from gramscope.base.rng import generator
from gramscope.tasks.sequences import SequenceTask, direction, fixated, noisy_task


def delayed_match(
    trials: int = 32, *, seed: int = 0, fixation: int = 5, stimulus: int = 10, delay: int = 15, response: int = 10,
    noise: float = 0.0,
) -> SequenceTask:  # fmt: skip
    """Delayed match to sample: two directions, a delay between them; are they the same?

    Inputs (3): fixation; cos θ, sin θ of the sample for ``stimulus`` steps, nothing for ``delay``, the test for
    ``stimulus``. Outputs (2): fixation; during the last ``response`` steps +1 for a match, -1 for none. Half of the
    trials match; in the others the test is turned by 90 to 270 degrees. All steps count.

    Reference: Yang et al., Nat. Neurosci. 22, 2019 (the task DMS).

    >>> task = delayed_match(4, seed=0)
    >>> task.x.shape, task.y.shape, sorted(task.y[:, -1, 1].tolist())
    (torch.Size([4, 50, 3]), torch.Size([4, 50, 2]), [-1.0, -1.0, 1.0, 1.0])
    """
    check_counts(1, trials=trials, stimulus=stimulus, response=response)
    check_counts(0, fixation=fixation, delay=delay)
    rng = generator(seed)
    sample = 2 * torch.pi * torch.rand(trials, generator=rng, device="cpu")
    turned = torch.pi * (0.5 + torch.rand(trials, generator=rng, device="cpu"))
    match = _half(trials, rng)
    test = sample + torch.where(match, 0.0, turned)
    steps = fixation + 2 * stimulus + delay + response
    x, y = fixated(trials, steps, response, 3, 2)
    x[:, fixation : fixation + stimulus, 1:] = direction(sample)
    second = fixation + stimulus + delay
    x[:, second : second + stimulus, 1:] = direction(test)
    y[:, steps - response :, 1] = torch.where(match, 1.0, -1.0)[:, None]
    return noisy_task(x, y, noise, rng)


def go_anti(
    trials: int = 32, *, seed: int = 0, fixation: int = 10, stimulus: int = 25, response: int = 15, noise: float = 0.0
) -> SequenceTask:
    """Go and anti-go: point to a direction, or opposite to it, as the rule says.

    Inputs (5): fixation; cos θ, sin θ from the end of fixation to the end; the rule as two signals, go and anti, on all
    the time. Outputs (3): fixation; in the last ``response`` steps cos φ, sin φ with φ = θ (go) or θ + 180 degrees
    (anti). Half of the trials are of each kind. All steps count.

    Reference: Yang et al., Nat. Neurosci. 22, 2019 (the tasks Go and Anti).

    >>> task = go_anti(6, seed=0)
    >>> aligned = (task.x[:, -1, 1:3] * task.y[:, -1, 1:]).sum(1)
    >>> bool(torch.allclose(aligned, task.x[:, 0, 3] - task.x[:, 0, 4]))
    True
    """
    check_counts(1, trials=trials, stimulus=stimulus, response=response)
    check_counts(0, fixation=fixation)
    rng = generator(seed)
    angle = 2 * torch.pi * torch.rand(trials, generator=rng, device="cpu")
    anti = _half(trials, rng)
    steps = fixation + stimulus + response
    x, y = fixated(trials, steps, response, 5, 3)
    x[:, fixation:, 1:3] = direction(angle)
    x[:, :, 3], x[:, :, 4] = 1.0 * ~anti[:, None], 1.0 * anti[:, None]
    y[:, steps - response :, 1:] = direction(angle + torch.pi * anti)
    return noisy_task(x, y, noise, rng)


def context_integration(
    trials: int = 32, *, seed: int = 0, fixation: int = 5, stimulus: int = 30, response: int = 15,
    coherence: float = 0.2, spread: float = 0.5, noise: float = 0.0,
) -> SequenceTask:  # fmt: skip
    """Integration by context: two noisy streams of evidence, of which a signal says which one to add up.

    Inputs (5): fixation; two streams, Gaussian around ±``coherence`` with standard deviation ``spread``; the context
    as two signals, on all the time. Outputs (2): fixation; in the last ``response`` steps the sign of the mean around
    which the chosen stream was drawn. Signs and contexts are independent. All steps count.

    Reference: Mante, Sussillo, Shenoy & Newsome, Nature 503, 2013.

    >>> task = context_integration(8, seed=0, spread=0.0)
    >>> chosen = (task.x[:, 5:35, 1:3] * task.x[:, 5:35, 3:]).sum(2).mean(1)
    >>> bool((chosen.sign() == task.y[:, -1, 1]).all())
    True
    """
    check_counts(1, trials=trials, stimulus=stimulus, response=response)
    check_counts(0, fixation=fixation)
    check_number(coherence, "coherence", above=0.0)
    check_number(spread, "spread", least=0.0)
    rng = generator(seed)
    signs = torch.stack([torch.where(_half(trials, rng), 1.0, -1.0) for _ in range(2)], dim=1)
    context = 1.0 * torch.nn.functional.one_hot(_half(trials, rng).long(), 2)
    steps = fixation + stimulus + response
    x, y = fixated(trials, steps, response, 5, 2)
    drawn = torch.randn(trials, stimulus, 2, generator=rng, device="cpu")
    x[:, fixation : fixation + stimulus, 1:3] = coherence * signs[:, None] + spread * drawn
    x[:, :, 3:] = context[:, None]
    y[:, steps - response :, 1] = (signs * context).sum(1)[:, None]
    return noisy_task(x, y, noise, rng)


def interval_timing(
    trials: int = 32, *, seed: int = 0, shortest: int = 8, longest: int = 20, wait: int = 5, noise: float = 0.0
) -> SequenceTask:
    """Ready, set, go: measure the interval between two pulses, and produce it again.

    Inputs (1): pulses of one step at ready and at set, an interval apart that is drawn between ``shortest`` and
    ``longest`` steps. Outputs (1): 0 until set, then a ramp that reaches 1 an interval later, and stays. ``wait`` steps
    pass before ready, up to as many more at random. All steps count.

    Reference: Remington, Narain, Hosseini & Jazayeri, Neuron 98, 2018.

    >>> task = interval_timing(3, seed=0)
    >>> ready, set_ = task.x[0, :, 0].nonzero().flatten().tolist()
    >>> task.y[0, set_, 0].item(), task.y[0, 2 * set_ - ready, 0].item()
    (0.0, 1.0)
    """
    check_counts(1, trials=trials, shortest=shortest)
    check_counts(0, wait=wait)
    check_counts(shortest, longest=longest)
    rng = generator(seed)
    interval = torch.randint(shortest, longest + 1, (trials,), generator=rng, device="cpu")
    ready = wait + torch.randint(wait + 1, (trials,), generator=rng, device="cpu")
    steps, each = 2 * wait + 2 * longest + 1, torch.arange(trials, device="cpu")
    x = torch.zeros(trials, steps, 1, device="cpu")
    x[each, ready, 0] = x[each, ready + interval, 0] = 1.0
    since = torch.arange(steps, device="cpu") - (ready + interval)[:, None]
    return noisy_task(x, (since / interval[:, None]).clamp(0, 1)[..., None], noise, rng)


def n_back(
    trials: int = 32,
    *,
    seed: int = 0,
    back: int = 2,
    symbols: int = 4,
    items: int = 10,
    hold: int = 5,
    noise: float = 0.0,
) -> SequenceTask:
    """n-back: is this symbol the one that was shown ``back`` symbols ago?

    Inputs (``symbols``): the symbol shown, one signal each, for ``hold`` steps. Outputs (1): +1 where it equals that
    of ``back`` symbols before, -1 where not. About half of the symbols repeat. Steps of the first ones do not count.

    Reference: Kirchner, J. Exp. Psychol. 55, 1958.

    >>> task = n_back(2, back=1, items=3, hold=2, seed=0)
    >>> task.mask.int().tolist()[0], task.x.shape
    ([0, 0, 1, 1, 1, 1], torch.Size([2, 6, 4]))
    """
    check_counts(1, trials=trials, back=back, items=items, hold=hold)
    check_counts(2, symbols=symbols)
    if items <= back:
        raise InputError(
            f"items must be more than back = {back}, so that there is something to compare with, got {items}."
        )
    rng = generator(seed)
    shown = torch.randint(symbols, (trials, items), generator=rng, device="cpu")
    repeats = torch.rand(trials, items, generator=rng, device="cpu") < 0.5
    for place in range(back, items):
        shown[:, place] = torch.where(repeats[:, place], shown[:, place - back], shown[:, place])
    same = torch.zeros(trials, items, device="cpu")
    same[:, back:] = torch.where(shown[:, back:] == shown[:, :-back], 1.0, -1.0)
    x = 1.0 * torch.nn.functional.one_hot(shown, symbols).repeat_interleave(hold, dim=1)
    task = noisy_task(x, same.repeat_interleave(hold, dim=1)[..., None], noise, rng)
    task.mask[:, : back * hold] = False
    return task


def _half(trials: int, rng: torch.Generator) -> Tensor:
    """True for half of the trials, in random order."""
    return torch.randperm(trials, generator=rng, device="cpu") < trials / 2
