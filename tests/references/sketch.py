"""Sketches by brute force: every gradient is formed by autograd, in float64, and then projected from both sides."""

from typing import Any

import torch
from torch import Tensor, nn

from references.jacobian import reference_jacobian


def reference_sketch(model: nn.Module, x: Any, projections: Any, names: Any, outputs: Any = None) -> dict[str, Tensor]:
    """``P_Rᵀ G P_C`` for each parameter: name -> (ρ, n, k, b·a), with the matrices that `projections` holds."""
    found = {}
    for name, gradient in reference_jacobian(model, x, outputs, frozen=True).items():
        if name not in names:
            continue
        factors = projections.factors(name, gradient.shape[2:], (), torch.float64, torch.device("cpu"))
        matrix = factors.matrix
        rows = gradient.reshape(*gradient.shape[:2], matrix.rows, matrix.columns)
        repeats = [
            torch.einsum("Rb,nkRC,Ca->nkba", explicit(factors, "rows", r), rows, explicit(factors, "columns", r))
            for r in range(factors.repeats)
        ]
        found[name] = torch.stack(repeats).flatten(3)
    return found


def explicit(factors: Any, side: str, repeat: int) -> Tensor:
    """The matrix of a side in one repeat; one that is not projected is held as a shape only."""
    factor = getattr(factors, side)
    return torch.eye(len(factor), dtype=factor.dtype) if side in factors.whole else factor[:, repeat]


def whole_features(sketch: Any, turned: Any = ()) -> dict[str, Tensor]:
    """All sketches as vectors: outer products are formed where signals and inputs are held apart."""
    found = dict(sketch.features)
    for name, inputs in sketch.inputs.items():
        signals = sketch.features[name]
        # Rows of the parameter belong to signals; of a parameter in `turned`, used as x @ W, to inputs.
        outer = signals[..., :, None] * inputs[..., None, :]
        found[name] = (outer.transpose(3, 4) if name in turned else outer).flatten(3)
    return found


def reference_kernel(sketch: Any, repeat: int) -> Tensor:
    """The kernel of one repeat: inner products of sketches, one pair of examples at a time."""
    features = whole_features(sketch)
    first = next(iter(features.values()))
    kernel = torch.zeros(first.shape[1], first.shape[1], dtype=torch.float64)
    for part in features.values():
        own = part[min(repeat, len(part) - 1)].double()
        for mu in range(len(kernel)):
            for nu in range(len(kernel)):
                kernel[mu, nu] += (own[mu] * own[nu]).sum()
    return kernel
