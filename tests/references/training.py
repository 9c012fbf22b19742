"""Sizes of gradients and updates, noise and curvature of a loss, by definition: one example, one entry at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def noise_scale(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> float:
    """tr Σ / |G|² of the gradients of single examples, both unbiased."""
    rows = []
    for i in range(len(x)):
        one = loss_gradients(model, x[i : i + 1], y[i : i + 1], loss)
        rows.append(torch.cat([g.flatten() for g in one.values()]))
    gradients = torch.stack(rows)
    covariance = (gradients - gradients.mean(0)).square().sum() / (len(x) - 1)
    return float(covariance / (gradients.mean(0).square().sum() - covariance / len(x)))


def hessian(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """All second derivatives of the loss, entry by entry of the gradient."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    rows = []
    for entry in torch.cat([g.flatten() for g in gradients]):
        row = torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in row]))
    return torch.stack(rows)


def by_layer(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Norm of all tensors of one layer together."""
    layers = {name.rpartition(".")[0] for name in tensors}
    return {
        layer: float(torch.cat([t.flatten() for name, t in tensors.items() if name.rpartition(".")[0] == layer]).norm())
        for layer in layers
    }
