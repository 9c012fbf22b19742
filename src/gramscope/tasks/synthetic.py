"""Small data sets made from a seed: a teacher network, and the sign of one direction."""

import torch
from torch import Tensor

from gramscope.tasks.digits import Task, mlp


def teacher_student(
    n: int = 512, inputs: int = 20, hidden: int = 4, classes: int = 3, test: int = 256, seed: int = 0
) -> Task:
    """Gaussian inputs, labelled by the largest output of a random two-layer ReLU network."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + test, inputs, generator=generator)
    with torch.no_grad():
        scores = mlp((inputs, hidden, classes), seed)(x)
    y = (scores - scores.mean(0)).argmax(1)
    return _split(x, y, test)


def heaviside(n: int = 512, inputs: int = 20, test: int = 256, seed: int = 0) -> Task:
    """Gaussian inputs, labelled by the sign of their first coordinate: one feature is all there is to find."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + test, inputs, generator=generator)
    return _split(x, (x[:, 0] > 0).long(), test)


def _split(x: Tensor, y: Tensor, test: int) -> Task:
    return Task(x[:-test], y[:-test], x[-test:], y[-test:])
