"""The step function of one variable: the smallest task in which features are learnt."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_counts
from gramscope.base.results import Result
from gramscope.base.rng import generator


@dataclass(frozen=True, repr=False)
class StepFunction(Result):
    """Points ``x`` (n, 1) in [-1, 1] and the target ``y`` (n, 1): 1 where x > 0, else 0."""

    x: Float[Tensor, "n 1"]
    y: Float[Tensor, "n 1"]


def heaviside_step(n: int = 1000, seed: int | None = None) -> StepFunction:
    """The Heaviside function on [-1, 1]: ``n`` points at the middles of equal intervals, or uniform ones with a seed.

    The network of the paper is ``mlp((1, 1000, 1000, 1000, 1))``; one eigenfunction of its features becomes the step.

    Reference: arXiv:2410.04264, figure 9.

    >>> heaviside_step(4).x.flatten().tolist(), heaviside_step(4).y.flatten().tolist()
    ([-0.75, -0.25, 0.25, 0.75], [0.0, 0.0, 1.0, 1.0])
    """
    check_counts(2, n=n)  # both sides of the step have a point
    if seed is None:
        x = (torch.arange(n, device="cpu") + 0.5) * 2 / n - 1
    else:
        x = 2 * torch.rand(n, generator=generator(seed), device="cpu") - 1
    return StepFunction(x[:, None], (x[:, None] > 0).to(x.dtype))
