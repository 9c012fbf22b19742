"""Small data sets made from a seed: a teacher network, and the sign of one direction."""

import torch

from gramscope.tasks.digits import Task, held_out, mlp
from gramscope.tasks.sizes import require_at_least, require_positive


def teacher_student(
    n: int = 512, inputs: int = 20, hidden: int = 4, classes: int = 3, test: int = 256, seed: int = 0
) -> Task:
    """Gaussian inputs, labelled by the largest output of a random two-layer ReLU network."""
    require_positive(n=n, inputs=inputs, hidden=hidden, classes=classes)
    require_at_least(0, test=test)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + test, inputs, generator=generator, device="cpu")
    with torch.no_grad():
        scores = mlp((inputs, hidden, classes), seed)(x)
    y = (scores - scores.mean(0)).argmax(1)
    return held_out(x, y, test)


def heaviside(n: int = 512, inputs: int = 20, test: int = 256, seed: int = 0) -> Task:
    """Gaussian inputs, labelled by the sign of their first coordinate: one feature is all there is to find."""
    require_positive(n=n, inputs=inputs)
    require_at_least(0, test=test)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + test, inputs, generator=generator, device="cpu")
    return held_out(x, (x[:, 0] > 0).long(), test)
