"""Handwritten digits, 8 x 8 pixels: 1,797 images that come with scikit-learn, so nothing is downloaded."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gramscope.base.checks import check_count, check_counts
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import generator, seeded
from gramscope.base.streams import streams_put_back


@dataclass(frozen=True, repr=False)
class Task(Result):
    """Training and test examples with integer labels."""

    x: Float[Tensor, "n *d"]
    y: Int[Tensor, " n"]
    x_test: Float[Tensor, "m *d"]
    y_test: Int[Tensor, " m"]

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def balanced(self, per_class: int) -> tuple[Float[Tensor, "k *d"], Int[Tensor, " k"]]:
        """The first ``per_class`` training examples of every class, sorted by class: a probe for kernels."""
        chosen = torch.cat([torch.nonzero(self.y == c).flatten()[:per_class] for c in range(self.classes)])
        return self.x[chosen], self.y[chosen]


def digits(seed: int = 0, test: int = 397) -> Task:
    """Digits with pixels standardised as one variable, shuffled by ``seed``; the last ``test`` are held out."""
    images, labels = _scikit_learn_digits()
    if check_count(test, "test", 0) >= len(labels):
        raise InputError(f"test must be less than the {len(labels)} examples, so that some are left, got {test}.")
    order = torch.randperm(len(labels), generator=generator(seed), device="cpu")
    x = torch.as_tensor(images, dtype=torch.float32, device="cpu")[order]
    y = torch.as_tensor(labels, device="cpu")[order].long()
    x = (x - x.mean()) / x.std()
    return held_out(x, y, test)


def held_out(x: Float[Tensor, "n d"], y: Int[Tensor, " n"], test: int) -> Task:
    """The last ``test`` examples held out, the others for training."""
    train = len(y) - test  # x[:-test] would hold out all of them where test is 0
    return Task(x[:train], y[:train], x[train:], y[train:])


def _scikit_learn_digits() -> tuple[Any, Any]:
    with streams_put_back():  # importing scikit-learn draws from Python's random numbers
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)


def mlp(widths: tuple[int, ...], seed: int = 0) -> nn.Sequential:
    """A ReLU network with torch's default initialisation, seeded without touching the global random stream."""
    if len(widths) < 2:
        raise InputError(
            f"widths must name at least the inputs and the outputs, got {widths}. Pass e.g. (784, 64, 10)."
        )
    check_counts(1, **{f"widths[{place}]": width for place, width in enumerate(widths)})
    layers: list[nn.Module] = []
    with seeded(seed):
        for place, (fan_in, fan_out) in enumerate(pairwise(widths)):
            layers += [nn.Linear(fan_in, fan_out)]
            if place < len(widths) - 2:
                layers += [nn.ReLU()]
    return nn.Sequential(*layers)
