"""Targets that are class labels: which are, and how they become rows."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gramscope.base.checks import check_count, check_tensor
from gramscope.base.errors import InputError

LARGEST = 2**32  # numbers in one-hot targets: 32 GiB of them


def are_labels(targets: Tensor) -> bool:
    """Whether targets are classes: whole numbers or booleans, one for each example. Other numbers are values."""
    one_each = targets.dim() == 1 or (targets.dim() == 2 and targets.shape[1] == 1)
    return one_each and not targets.is_floating_point() and not targets.is_complex()


def target_rows(targets: Tensor, classes: int | None = None) -> Tensor:
    """Labels (n,) as one-hot rows; other targets as they are.

    >>> target_rows(torch.tensor([1, 0])).tolist(), target_rows(torch.tensor([1.0, 0.0])).tolist()
    ([[0.0, 1.0], [1.0, 0.0]], [1.0, 0.0])
    """
    return one_hot(class_labels(targets), classes) if are_labels(check_tensor(targets, "targets")) else targets


def class_labels(labels: Tensor, *, negative: bool = False) -> Int[Tensor, " n"]:
    """Labels (n,) as int64; one-hot rows (n, C) count as the labels they stand for.

    Negative ones are refused unless ``negative``: as a rule they mark examples without a class (torch's -100).
    """
    labels = check_tensor(labels, "labels").detach()
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() == 2:
        hot = labels != 0
        if not bool(((labels == 1) == hot).all()) or not bool((hot.sum(1) == 1).all()):
            raise InputError("labels must be classes (n,) or one-hot rows (n, C), got rows that are not one-hot.")
        return hot.long().argmax(1)
    if labels.dim() != 1:
        raise InputError(f"labels must have shape (n,) or be one-hot (n, C), got {tuple(labels.shape)}.")
    if labels.is_floating_point() and not bool((labels.isfinite() & (labels == labels.round())).all()):
        raise InputError("labels must be whole numbers, got fractions. Pass classes, not regression targets.")
    labels = labels.long()
    if not negative and len(labels) and int(labels.min()) < 0:
        raise InputError(
            f"class labels must be numbered from 0, got {int(labels.min())}. Drop ignored examples (label -100) first; "
            "where negative labels are classes, renumber them: labels.unique(return_inverse=True)[1]."
        )
    return labels


def one_hot(labels: Int[Tensor, " n"], classes: int | None = None) -> Float[Tensor, "n C"]:
    """Labels from 0 as float64 rows; as many columns as ``classes``, or as the largest label needs."""
    largest = int(labels.max()) if len(labels) else 0
    if classes is not None and largest >= check_count(classes, "classes"):
        raise InputError(f"class labels must be between 0 and {classes - 1}, got {largest}. Check classes=.")
    width = classes or largest + 1
    if len(labels) * width > LARGEST:
        raise InputError(
            f"class labels must be numbered from 0 without large gaps, but these need one-hot targets of "
            f"{len(labels)} x {width}. Renumber all of them together: labels.unique(return_inverse=True)[1]."
        )
    return torch.nn.functional.one_hot(labels, width).double()


def one_hot_present(labels: Shaped[Tensor, " n"]) -> Float[Tensor, "n C"]:
    """Classes of a whole data set as float64 rows, a column for each class that has an example.

    >>> one_hot_present(torch.tensor([7, 7, 2])).tolist()
    [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    """
    present, places = labels.unique(return_inverse=True)
    return one_hot(places, len(present))
