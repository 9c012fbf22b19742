"""Classification by a scalar output: the class is the nearest whole number."""

from torch import Tensor

from gramscope.base.checks import check_finite
from gramscope.base.errors import InputError
from gramscope.measures.class_moments import class_labels


def regression_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of examples with ``i - ½ < f(x) < i + ½`` for the label i: a regression network as a classifier.

    Args:
        outputs: f (n,) or (n, 1), one number for each example.
        labels: classes (n,) as whole numbers.

    Reference: arXiv:2410.04264, appendix D.3 and figure 10 (ResNet-18 on digits with one output).

    Example:
        >>> import torch
        >>> regression_accuracy(torch.tensor([0.2, 1.4, 2.6, 3.5]), torch.tensor([0, 1, 2, 3]))
        0.5
    """
    if outputs.dim() not in (1, 2) or outputs.numel() != len(outputs) or len(outputs) == 0:
        raise InputError(
            f"outputs must be one number for each example, (n,) or (n, 1), got shape {tuple(outputs.shape)}. "
            "For one output a class, compare argmax with the labels."
        )
    check_finite(outputs, "outputs", "Look for a run that has diverged.")
    wanted = class_labels(labels)
    if len(wanted) != len(outputs):
        raise InputError(f"outputs and labels must be of the same examples, got {len(outputs)} and {len(wanted)}.")
    distance = (outputs.detach().double().reshape(-1) - wanted.to(outputs.device)).abs()
    return float((distance < 0.5).double().mean())
