"""How outputs are judged by targets, from the shapes of both; refused in words where they do not go together."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.hierarchy.losses import Loss, loss_function

Kind = Literal["numbers", "classes", "binary", "own"]
IGNORED = -100  # torch's label of a position that does not count
_ADVICE = "Pass loss=(outputs, y) -> number to watch, or outputs= to choose other outputs."


@dataclass(frozen=True, eq=False)
class Objective:
    """Outputs of ``shape`` (without the axis of examples) against y.

    Numbers: mean squared error. Labels: cross-entropy over the axis ``classes`` of the outputs, one label for each of
    the other entries. 0 and 1 for each output: binary cross-entropy of logits. A loss of the user's own comes first.
    """

    kind: Kind
    shape: tuple[int, ...]
    classes: int = -1
    own: Loss | None = None

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        own_shape = self._shaped(f)
        if self.own is not None:
            return self.own(own_shape, y)
        if self.kind == "numbers":
            return F.mse_loss(own_shape, y.reshape(own_shape.shape).to(f.dtype))
        if self.kind == "binary":
            return F.binary_cross_entropy_with_logits(own_shape, y.reshape(own_shape.shape).to(f.dtype))
        return F.cross_entropy(self.by_class(own_shape), y.reshape(-1), ignore_index=IGNORED)

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """The loss of each example with labels for its positions; they sum to ``loss``."""
        each = F.cross_entropy(self.by_class(f), y.reshape(-1), ignore_index=IGNORED, reduction="none")
        return each.reshape(len(f), -1).sum(1) / (y != IGNORED).sum()

    def accuracy(self, f: Tensor, y: Tensor) -> float | None:
        """Share of labels that are met; None for numbers."""
        if self.kind == "binary":
            return float(((f.reshape(-1) > 0) == (y.reshape(-1) > 0)).double().mean())
        if self.kind != "classes":
            return None
        labels = y.reshape(-1)
        counted = labels != IGNORED
        right = self.by_class(f).argmax(1) == labels
        return float(right[counted].double().mean())

    def rows(self, y: Tensor) -> Tensor:
        """Targets as one float64 row for each example: one-hot for classes."""
        if y.is_floating_point() or (self.kind == "binary" and y.numel() > len(y)):
            return y.reshape(len(y), -1).double()
        present, places = y.unique(return_inverse=True)  # a column of zeros would change no inner product
        return F.one_hot(places)[..., present >= 0].double().reshape(len(y), -1)

    def few_rows(self, y: Tensor) -> Tensor:
        """Rows with the inner products of ``rows``; n numbers each where labels belong to positions."""
        if not self.by_position:
            return self.rows(y)
        labels = y.reshape(len(y), -1)
        gram = torch.stack([((labels == own) & (own != IGNORED)).sum(1) for own in labels]).double()
        values, vectors = torch.linalg.eigh(gram.cpu())  # small; on a GPU the library's first call takes 0.2 seconds
        return vectors * values.clamp(min=0).sqrt()

    @property
    def count(self) -> int:
        """Number of classes."""
        return self.shape[-1] if self.classes == -1 else self.shape[0]

    @property
    def size(self) -> int:
        """Outputs of one example; -1 where they were not seen."""
        return math.prod(self.shape)

    @property
    def by_position(self) -> bool:
        """Does each example have several labels, one for each of its positions?"""
        return self.kind == "classes" and len(self.shape) > 1

    @property
    def positions(self) -> int:
        """Labels of one example."""
        return self.size // self.count if self.by_position else 1

    def _shaped(self, f: Tensor) -> Tensor:
        if -1 not in self.shape and f.numel() != len(f) * self.size:
            raise InputError(
                f"the model must give {self.size} outputs for each example, as when the watch began, got "
                f"{f.numel() // len(f)}. Its last layer was replaced: close this watch and begin another."
            )
        return f.reshape(len(f), *self.shape)

    def by_class(self, f: Tensor) -> Tensor:
        """The outputs as a row of classes for each label."""
        f = self._shaped(f)
        return f.movedim(self.classes, -1).reshape(-1, f.shape[self.classes])


def objective_of(y: Tensor | None, shape: tuple[int, ...], loss: str | Loss | None) -> Objective:
    """How outputs of this shape are judged by y."""
    if loss == "cross_entropy" and y is not None and not y.is_floating_point():
        return replace(objective_of(y, shape, None), own=loss_function(loss))
    if y is None or loss is not None:
        return _own(y, shape, None if loss is None else loss_function(loss))
    got = f"got outputs of shape (n, {', '.join(map(str, shape))}) and y of {tuple(y.shape)}. {_ADVICE}"
    if y.is_floating_point():
        if y.numel() != len(y) * math.prod(shape):
            labels = " Class labels are whole numbers: pass y.long()." if y.numel() == len(y) else ""
            raise InputError(f"y must have a number for each output, {got}{labels}")
        return Objective("numbers", shape)
    zero_or_one = bool(((y == 0) | (y == 1)).all())
    if y.numel() == len(y) * math.prod(shape):
        if not zero_or_one:
            raise InputError(f"labels must be 0 or 1 if each has one output, but they reach {int(y.max())}: {got}")
        return Objective("binary", shape)
    if y.numel() == len(y):
        return _checked(Objective("classes", (math.prod(shape),)), y)
    rest = tuple(y.shape[1:])
    last, first = rest == shape[:-1], rest == shape[1:]
    if last and first:
        raise InputError(f"it must be clear which axis of the outputs holds the classes, {got}")
    if not last and not first:
        last_only = len(shape) == 2 and shape[0] == 1  # nanoGPT's model gives one position, if it is given no targets
        targets_too = " If the model gives all positions only when it has the targets, pass probe=((x, y), y)."
        advice = targets_too if last_only else ""
        raise InputError(f"y must have a label for each example, or for each of its positions, {got}{advice}")
    return _checked(Objective("classes", shape, -1 if last else 1), y)


def unknown_objective(y: Tensor | None, loss: str | Loss | None) -> Objective:
    """For outputs that could not be seen beforehand: one row for each example."""
    own = None if loss is None else loss_function(loss)
    return Objective("numbers" if y is not None and y.is_floating_point() else "classes", (-1,), own=own)


def _own(y: Tensor | None, shape: tuple[int, ...], own: Loss | None) -> Objective:
    labels = y is not None and not y.is_floating_point() and y.numel() == len(y) and len(shape) == 1 and shape[0] > 1
    # Larger ones are no classes, but pairs of a contrastive loss, say.
    labels = labels and y is not None and int(y.max()) < shape[0]
    return Objective("classes" if labels else "own", shape, own=own)


def _checked(objective: Objective, y: Tensor) -> Objective:
    known = y[y != IGNORED]
    count = objective.count
    if known.numel() and (int(known.min()) < 0 or int(known.max()) >= count):
        raise InputError(
            f"labels must lie between 0 and {count - 1}, for {count} outputs ({IGNORED} for none), but they reach from "
            f"{int(known.min())} to {int(known.max())}. {_ADVICE}"
        )
    return objective


def plain_labels(y: Tensor) -> Tensor:
    """Labels as whole numbers of 64 bits, also true and false; numbers as they are."""
    return y if y.is_floating_point() else y.to(torch.int64)
