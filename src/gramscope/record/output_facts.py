"""What the outputs say by themselves: whether they are probabilities already, and affine in the inputs."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.nested import ModelInput, map_tensors, tensors_in
from gramscope.capture.network import count_examples, evaluate, prepare_input
from gramscope.capture.side_effects import plain_execution, untouched
from gramscope.record.objective import Objective
from gramscope.record.subject import Subject, evaluating

FOURTHS = 16  # triples of examples at which the outputs are compared
ROUNDED = 1e-3  # of one: probabilities of 16 bits sum to it no better


def are_probabilities(f: Float[Tensor, "n C"], objective: Objective) -> bool | None:
    """Whether all outputs lie in [0, 1], and of several classes sum to one; None where they are no logits of labels."""
    if objective.kind == "binary":
        return bool(((f >= 0) & (f <= 1)).all())
    if objective.kind != "classes" or objective.count < 2:
        return None
    rows = objective.by_class(f).float()
    return bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < ROUNDED).all())


def not_affine(subject: Subject) -> float:
    """How far ``f(a) + f(b) - f(c)`` lies from ``f(a + b - c)``, against ``f(a) - f(c)``: 0 for affine outputs.

    One forward pass in evaluation mode, over examples a, b, c of the probe. NaN where it cannot be told: inputs that
    are no numbers, a single matrix of weights, fewer than three examples, outputs that do not vary, or a network that
    refuses such inputs.
    """
    x, model = subject.x, subject.model
    third = min(FOURTHS, count_examples(x) // 3)
    matrices = sum(p.dim() > 1 for p in model.parameters())
    if third < 1 or matrices < 2 or not all(t.is_floating_point() for t in tensors_in(x)):
        return math.nan
    try:
        with untouched(model, throughout=False) as made, plain_execution(), evaluating(model), torch.no_grad(), made:
            found = evaluate(model, prepare_input(_with_sums(x, third)), 4 * third, subject.outputs)
    except Exception:  # these inputs are ours: a network may refuse them
        return math.nan
    a, b, c, fourth = found.double().split(third)
    size = float((a - c).square().mean().sqrt())
    return float((a + b - c - fourth).square().mean().sqrt()) / size if size > 0 else math.nan


def _with_sums(x: ModelInput, third: int) -> ModelInput:
    def rows(t: Tensor) -> Tensor:
        a, b, c = t[: 3 * third].detach().split(third)
        return torch.cat([a, b, c, a + b - c])

    return map_tensors(rows, x)
