"""Checks of what a solver or an estimate is given, before the first product."""

import math
import operator
from numbers import Real
from typing import Any

import torch

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


def require_whole(least: int, **numbers: Any) -> None:
    """Raise unless every number is whole and at least ``least``."""
    for name, number in numbers.items():
        if not _is_whole(number) or number < least:
            raise InputError(f"{name} must be at least {least}, a whole number, got {number!r}.")


def require_tolerance(tol: object) -> None:
    """Raise unless ``tol`` is a number that a relative residual can be compared with."""
    if not isinstance(tol, Real) or isinstance(tol, bool) or not 0 <= float(tol) < math.inf:
        raise InputError(f"tol must be a relative residual, a finite number of at least 0, got {tol!r}.")


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative residual to ask for: 4e-11 in float64, 2e-5 in float32.

    The two-thirds power leaves room for the rounding of the products, which no iteration can go below.
    """
    return float(torch.finfo(dtype).eps ** (2 / 3))


def stream(seed: Any, *labels: str | int) -> torch.Generator:
    """The random numbers of one part of a computation at ``seed``."""
    if not _is_whole(seed):
        raise InputError(f"seed must be a whole number, got {seed!r}. Pass e.g. seed=0.")
    return generator(child_seed(operator.index(seed), *labels))


def _is_whole(number: object) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, bool)
