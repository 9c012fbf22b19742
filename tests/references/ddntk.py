"""The two ddNTKs by their definitions: every second and third derivative of every output, in float64."""

import torch
from torch import Tensor, nn

from references.dntk import flat_jacobian, hessians


def third_derivatives(model: nn.Module, x: Tensor) -> Tensor:
    """(U, P, P, P), entry by entry, from three backward passes within one another."""
    parameters = list(model.parameters())

    def flat(value: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.zeros(sum(p.numel() for p in parameters), dtype=value.dtype)
        found = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
        parts = zip(found, parameters, strict=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in parts])

    each = []
    for value in model(x).flatten():
        rows = [flat(entry) for entry in flat(value)]
        each.append(torch.stack([torch.stack([flat(entry).detach() for entry in row]) for row in rows]))
    return torch.stack(each)


def ddntks_by_definition(model: nn.Module, x: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """ddI (U⁴) and ddII (U⁴): the sums over parameters of the module docstring, all written out."""
    J = flat_jacobian(model, x).detach()
    H, T = hessians(model, x), third_derivatives(model, x)
    u = rates * J
    first = torch.einsum("ampq,bm,cp,dq->abcd", T, u, u, u)
    second = torch.einsum("amp,m,bmq,cp,dq->abcd", H, rates, H, u, u)
    return first, second
