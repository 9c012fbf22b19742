"""Checks of what a solver or an estimate is given, before the first product."""

import operator

import torch

from gramscope.base.checks import is_whole
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.rng import child_seed, generator
from gramscope.linalg.operator import LinearOperator


def require_operator(op: object, purpose: str) -> None:
    """Raise unless ``op`` is a linear operator."""
    if not isinstance(op, LinearOperator):
        raise UnsupportedError(
            f"{purpose} needs a LinearOperator, got {type(op).__name__}. Wrap a matrix: Dense(matrix), or "
            "Dense(matrix, symmetric=True) where it is symmetric."
        )


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative residual to ask for: 4e-11 in float64, 2e-5 in float32.

    The two-thirds power is above the rounding of the products, which no iteration can go below.
    """
    return float(torch.finfo(dtype).eps ** (2 / 3))


def stream(seed: object, *labels: str | int) -> torch.Generator:
    """The random numbers of one part of a computation at ``seed``."""
    if not is_whole(seed):
        raise InputError(f"seed must be a whole number, got {seed!r}. Pass e.g. seed=0.")
    return generator(child_seed(operator.index(seed), *labels))
