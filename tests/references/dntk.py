"""The dNTK by its definition (full Hessians) and by the forward equation (11.24), both slow, both float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from references.jacobian import flat_outputs, private_copy


def flat_jacobian(model: nn.Module, x: Any) -> Tensor:
    """(U, P) by one backward pass an output."""
    parameters = list(model.parameters())
    f = flat_outputs(model, x).flatten()
    rows = [torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True) for value in f]
    return torch.stack([torch.cat([_dense(g, p) for g, p in zip(row, parameters, strict=True)]) for row in rows])


def hessians(model: nn.Module, x: Any) -> Tensor:
    """(U, P, P): every second derivative of every output."""
    parameters = list(model.parameters())
    each = []
    for value in flat_outputs(model, x).flatten():
        first = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
        entries = torch.cat([_dense(g, p) for g, p in zip(first, parameters, strict=True)])
        rows = []
        for entry in entries:
            if not entry.requires_grad:
                rows.append(torch.zeros(len(entries), dtype=entry.dtype))
                continue
            second = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
            rows.append(torch.cat([_dense(g, p) for g, p in zip(second, parameters, strict=True)]))
        each.append(torch.stack(rows))
    return torch.stack(each).detach()


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter).flatten() if gradient is None else gradient.flatten()


def dntk_by_definition(model: nn.Module, x: Any, rates: Tensor) -> Tensor:
    """(U, U, U): sum over parameters of lambda lambda H J J (11.8)."""
    jacobian = flat_jacobian(model, x).detach()
    return torch.einsum("imn,m,n,jm,kn->ijk", hessians(model, x), rates, rates, jacobian, jacobian)


def velocity_by_differences(
    model: nn.Module, x: Any, residual: Tensor, rates: Tensor | None = None, h: float = 1e-5
) -> Tensor:
    """d (J rates J^T) / d lr by central differences of real steps; errors O(h^2) and rounding/h."""
    jacobian = flat_jacobian(model, x)
    rates = torch.ones(jacobian.shape[1], dtype=jacobian.dtype) if rates is None else rates
    step = rates * (residual.flatten() @ jacobian)
    kernels = []
    for sign in (1, -1):
        moved = private_copy(model)
        flat = parameters_to_vector(moved.parameters())
        vector_to_parameters(flat - sign * h * step, moved.parameters())
        rows = flat_jacobian(moved, x)
        kernels.append((rows * rates) @ rows.T)
    return ((kernels[0] - kernels[1]) / (2 * h)).reshape(*residual.shape, *residual.shape)


def dntk_by_forward_equation(
    weights: list[Tensor], biases: list[Tensor], x: Tensor, lambda_b: list[float], lambda_W: list[float]
) -> tuple[Tensor, Tensor]:
    """H (n, C, n, C) and dH (n, C, n, C, n, C) of a tanh network, layer by layer (11.24), (8.12)."""
    n, width = len(x), len(weights[0])
    eye = torch.eye(width, dtype=x.dtype)
    z = x @ weights[0].T + biases[0]
    inner = lambda_b[0] + lambda_W[0] / x.shape[1] * x @ x.T
    H = torch.einsum("ij,ab->aibj", eye, inner)
    dH = torch.zeros(n, width, n, width, n, width, dtype=x.dtype)
    for W, b, lb, lw in zip(weights[1:], biases[1:], lambda_b[1:], lambda_W[1:], strict=True):
        s = torch.tanh(z)
        s1 = 1 - s**2
        s2 = -2 * s * s1
        eye, rate = torch.eye(len(W), dtype=x.dtype), lw / W.shape[1]
        bent = torch.einsum("ak,bl,cm,akblcm->akblcm", s1, s1, s1, dH)
        bent += torch.einsum("ak,bl,cm,akbl,akcm->akblcm", s2, s1, s1, H, H)
        new = torch.einsum("ik,jl,hm,akblcm->aibjch", W, W, W, bent)
        crossed = torch.einsum("ak,bk,cm,akcm,hm->abch", s1, s, s1, H, W)
        new += rate * torch.einsum("ij,abch->aibjch", eye, crossed)
        new += rate * torch.einsum("ih,acbj->aibjch", eye, crossed)
        H = torch.einsum("ij,ab->aibj", eye, lb + rate * s @ s.T) + torch.einsum(
            "ik,jl,ak,bl,akbl->aibj", W, W, s1, s1, H
        )
        dH, z = new, s @ W.T + b
    return H, dH
