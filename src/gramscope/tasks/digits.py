"""Handwritten digits, 8 x 8 pixels: 1,797 images that come with scikit-learn, so nothing is downloaded."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """Training and test examples with integer labels."""

    x: Float[Tensor, "n d"]
    y: Int[Tensor, " n"]
    x_test: Float[Tensor, "m d"]
    y_test: Int[Tensor, " m"]

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def balanced(self, per_class: int) -> tuple[Float[Tensor, "k d"], Int[Tensor, " k"]]:
        """The first ``per_class`` training examples of every class, sorted by class: a probe for kernels."""
        chosen = torch.cat([torch.nonzero(self.y == c).flatten()[:per_class] for c in range(self.classes)])
        return self.x[chosen], self.y[chosen]


def digits(seed: int = 0, test: int = 397) -> Task:
    """Digits with pixels standardised as one variable, shuffled by ``seed``; the last ``test`` are held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.as_tensor(images, dtype=torch.float32)[order]
    y = torch.as_tensor(labels)[order].long()
    x = (x - x.mean()) / x.std()
    return Task(x[:-test], y[:-test], x[-test:], y[-test:])


def mlp(widths: tuple[int, ...], seed: int = 0) -> nn.Sequential:
    """A ReLU network with torch's default initialisation, seeded without touching the global random stream."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for place, (fan_in, fan_out) in enumerate(pairwise(widths)):
            layers += [nn.Linear(fan_in, fan_out)]
            if place < len(widths) - 2:
                layers += [nn.ReLU()]
    return nn.Sequential(*layers)
