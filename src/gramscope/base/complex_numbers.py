"""A complex number is two real ones: gradients, steps and kernels count both."""

import torch
from torch import Tensor


def real_view(tensor: Tensor) -> Tensor:
    """A complex tensor as real and imaginary parts on a last axis of two, any other as it is.

    Inner products of such views are ``Re ⟨a, b⟩``, with which torch's gradients of complex tensors are consistent.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def with_precision_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A real or complex tensor in the precision of the real ``dtype``; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.promote_types(dtype, torch.complex32))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
