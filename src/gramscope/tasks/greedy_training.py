"""Greedy layerwise training: each layer is trained with a classifier of its own, frozen, and the next one follows."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.charts import line_chart
from gramscope.base.checks import check_count, check_lr
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.base.rng import child_seed, generator, seeded


@dataclass(frozen=True, repr=False)
class GreedyRun(Result):
    """The trained network, the auxiliary classifiers by stage, and the mean training loss of each epoch by stage."""

    model: nn.Sequential
    classifiers: list[nn.Module] = field(repr=False)
    losses: list[list[float]]

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The training loss of each stage over its epochs."""
        lines = {f"stage {stage}": losses for stage, losses in enumerate(self.losses)}
        epochs = range(max(map(len, self.losses), default=0))
        return line_chart(epochs, lines, "Greedy layerwise training", "epoch", axes=axes, ylabel="training loss")


def greedy_layerwise(
    model: nn.Sequential,
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "n C"],
    ends: Sequence[int],
    *,
    epochs: int = 10,
    lr: float = 1e-3,
    batch_size: int = 128,
    seed: int = 0,
) -> GreedyRun:
    """Train ``model`` stage by stage with Adam on the squared error, each stage with an auxiliary linear classifier.

    Stage i is ``model[ends[i-1]:ends[i]]``. It is trained with a fresh ``Linear`` on its flattened outputs while all
    before it is frozen (in evaluation mode); then it is frozen. What follows the last end is trained last, without a
    classifier: the network's own readout. ``model`` is left as it was; a trained copy is returned.

    Args:
        model: a chain of layers.
        x: inputs.
        y: targets (n, C), e.g. one-hot rows.
        ends: where stages end, ascending, between 0 and the length of the model, both excluded.
        epochs: passes over the data for each stage.
        lr, batch_size, seed: of Adam, of its batches, of classifiers and order.

    Reference: arXiv:2410.04264, appendix I and figure 21 (Ivakhnenko & Lapa 1965).

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> run = greedy_layerwise(model, torch.randn(20, 3), torch.randn(20, 2), ends=[2, 4], epochs=2)
        >>> len(run.classifiers), [len(losses) for losses in run.losses]
        (2, [2, 2, 2])
    """
    check_lr(lr)
    batch_size, epochs = check_count(batch_size, "batch_size"), check_count(epochs, "epochs")
    bounds = _bounds(model, x, y, ends)
    trained = copy.deepcopy(model)
    inputs = x.detach()
    classifiers: list[nn.Module] = []
    losses: list[list[float]] = []
    for place, (begin, end) in enumerate(pairwise(bounds)):
        stage = trained[begin:end]
        full = nn.Sequential(stage)
        if end < len(trained):
            classifiers.append(_classifier(stage, inputs, y, child_seed(seed, "classifier", place)))
            full = nn.Sequential(stage, nn.Flatten(), classifiers[-1])
        with seeded(child_seed(seed, "dropout", place)):
            losses.append(_train(full, inputs, y, epochs, lr, batch_size, child_seed(seed, "order", place)))
        inputs = _outputs(stage, inputs, batch_size)
    return GreedyRun(trained.train(model.training), classifiers, losses)


def _bounds(model: nn.Sequential, x: Tensor, y: Tensor, ends: Sequence[int]) -> list[int]:
    bounds = [0, *ends, len(model)]
    if len(bounds) < 3 or any(a >= b for a, b in pairwise(bounds)):
        raise InputError(
            f"ends must rise, between 0 and the {len(model)} layers of the model, both excluded, got {list(ends)}. "
            "Pass e.g. the places behind each activation."
        )
    for begin, end in pairwise(bounds):
        if not any(p.requires_grad for p in model[begin:end].parameters()):
            raise InputError(
                f"every stage must have parameters to train, but layers {begin} to {end - 1} have none. Move an end."
            )
    if y.dim() != 2 or len(x) != len(y) or len(x) == 0 or not y.is_floating_point():
        raise InputError(
            f"y must be targets (n, C), floating, one row for each of {len(x)} inputs, got {tuple(y.shape)} "
            f"({y.dtype}). Pass torch.nn.functional.one_hot(labels).float()."
        )
    return bounds


def _classifier(stage: nn.Module, inputs: Tensor, y: Tensor, seed: int) -> nn.Linear:
    width = _outputs(stage, inputs[:1], 1).flatten(1).shape[1]
    with seeded(seed):
        return nn.Linear(width, y.shape[1]).to(device=y.device, dtype=y.dtype)


def _outputs(stage: nn.Module, inputs: Tensor, batch_size: int) -> Tensor:
    """What the stage puts out in evaluation mode, for the next one to be trained on."""
    stage.eval()
    with torch.no_grad():
        return torch.cat([stage(part) for part in inputs.split(batch_size)])


def _train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float, batch_size: int, seed: int) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, rng, losses = torch.optim.Adam(parameters, lr=lr), generator(seed), []
    model.train()
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x), generator=rng, device="cpu").split(batch_size):
            optimizer.zero_grad()
            loss = (model(x[rows]) - y[rows]).square().mean()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(x))
    optimizer.zero_grad()
    return losses
