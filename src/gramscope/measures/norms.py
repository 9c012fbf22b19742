"""Norms of many tensors in float64, read from the device in one go."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Euclidean norms. A GPU is asked once.

    >>> norms({"a": torch.tensor([3.0, 4.0])})
    {'a': 5.0}
    """
    dense = {name: t.to_dense() if t.is_sparse else t for name, t in tensors.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in dense.items():
        by_device.setdefault(tensor.device, []).append(name)
    found: dict[str, float] = {}
    for names in by_device.values():
        real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in map(dense.__getitem__, names)]
        sizes = torch._foreach_norm(real, 2, torch.float64)  # a few launches on a GPU, not one for each tensor
        found |= dict(zip(names, torch.stack(sizes).tolist(), strict=True))
    return {name: found[name] for name in tensors}


def squared_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: size**2 if size < 1e154 else math.inf for name, size in norms(tensors).items()}
