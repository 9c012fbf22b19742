"""Small data sets made from a seed: a teacher network, the sign of one direction, and the Swiss roll."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_counts
from gramscope.base.results import Result
from gramscope.base.rng import generator
from gramscope.tasks.digit_images import Task, held_out, mlp


def teacher_student(
    n: int = 512, inputs: int = 20, hidden: int = 4, classes: int = 3, test: int = 256, seed: int = 0
) -> Task:
    """Gaussian inputs, labelled by the largest output of a random two-layer ReLU network.

    >>> teacher_student(n=100, inputs=5).x.shape
    torch.Size([100, 5])
    """
    check_counts(1, n=n, inputs=inputs, hidden=hidden, classes=classes)
    check_counts(0, test=test)
    x = torch.randn(n + test, inputs, generator=generator(seed), device="cpu")
    with torch.no_grad():
        scores = mlp((inputs, hidden, classes), seed)(x)
    y = (scores - scores.mean(0)).argmax(1)
    return held_out(x, y, test)


def heaviside(n: int = 512, inputs: int = 20, test: int = 256, seed: int = 0) -> Task:
    """Gaussian inputs, labelled by the sign of their first coordinate: one feature is all there is to find.

    >>> task = heaviside(n=50)
    >>> bool(((task.x[:, 0] > 0).long() == task.y).all())
    True
    """
    check_counts(1, n=n, inputs=inputs)
    check_counts(0, test=test)
    x = torch.randn(n + test, inputs, generator=generator(seed), device="cpu")
    return held_out(x, (x[:, 0] > 0).long(), test)


@dataclass(frozen=True, repr=False)
class SwissRoll(Result):
    """Points ``x`` (n, 3), standardised, and the target ``y`` (n, 1): the angle along the roll, standardised."""

    x: Float[Tensor, "n 3"]
    y: Float[Tensor, "n 1"]


def swiss_roll(n: int = 500, seed: int = 0, *, noise: float = 0.0, dtype: torch.dtype = torch.float64) -> SwissRoll:
    """``(φ cos φ, 21 h, φ sin φ)`` with φ uniform on [1.5π, 4.5π] and h on [0, 1], plus noise; each axis standardised.

    No linear map of x says much of φ, and a network must unroll the sheet to fit it. Seeded without touching torch's
    global random stream.

    >>> roll = swiss_roll(100)
    >>> roll.x.shape, roll.y.shape
    (torch.Size([100, 3]), torch.Size([100, 1]))
    """
    check_counts(2, n=n)  # one point has no spread to be standardised by
    rng = generator(seed)
    along, across = torch.rand(2, n, generator=rng, dtype=torch.float64, device="cpu")
    angle = 1.5 * math.pi * (1 + 2 * along)
    x = torch.stack([angle * angle.cos(), 21 * across, angle * angle.sin()], dim=1)
    x = x + noise * torch.randn(x.shape, generator=rng, dtype=torch.float64, device="cpu")
    y = angle[:, None]
    return SwissRoll(((x - x.mean(0)) / x.std(0)).to(dtype), ((y - y.mean()) / y.std()).to(dtype))
