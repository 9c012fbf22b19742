"""Checks of what a solver or an estimate is given, before the first product."""

import torch
from torch import Tensor

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.linalg.operator import LinearOperator


def require_operator(op: object, purpose: str) -> None:
    """Raise unless ``op`` is a linear operator."""
    if not isinstance(op, LinearOperator):
        raise UnsupportedError(
            f"{purpose} needs a LinearOperator, got {type(op).__name__}. Wrap a matrix: Dense(matrix), or "
            "Dense(matrix, symmetric=True) where it is symmetric."
        )


def require_square(op: LinearOperator, purpose: str) -> None:
    """Raise unless it is an operator that maps a space to itself."""
    require_operator(op, purpose)
    if not op.rows.matches(op.cols):
        raise InputError(
            f"{purpose} needs an operator with the same axes on both sides, got rows {op.rows!r} and "
            f"cols {op.cols!r}. For a rectangular A use A @ A.T or A.T @ A."
        )


def require_symmetric(op: LinearOperator, purpose: str) -> None:
    """Raise unless it is an operator that is declared symmetric."""
    require_operator(op, purpose)
    if not op.symmetric:
        raise InputError(
            f"{purpose} needs a symmetric operator, got {op!r}. If it is symmetric, declare it where "
            "it is built (symmetric=True); if not, use A @ A.T, A.T @ A or 0.5 * (A + A.T)."
        )


def require_finite(products: Tensor, op: LinearOperator) -> None:
    """Raise if products with the operator hold NaN or infinity, which no iteration recovers from."""
    if not bool(torch.isfinite(products).all()):
        raise InputError(
            f"products with {op!r} must be finite, got NaN or infinity. "
            "Check what the operator is made of; in float32 it may have overflowed."
        )


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative residual to ask for: 4e-11 in float64, 2e-5 in float32.

    The two-thirds power is above the rounding of the products, which no iteration can go below.
    """
    return float(torch.finfo(dtype).eps ** (2 / 3))
