"""Feature learning by brute force: loops, dense projectors, Kronecker products and plain autograd, in float64."""

import torch
from torch import Tensor, nn

from references.jacobian import first_tensor


def reference_sides(layer: nn.Module, x: Tensor, above) -> tuple[Tensor, Tensor]:
    """``Wᵀ ∇_W L`` and ``(∇_H L)ᵀ H`` (g, i, i) of one linear or convolution layer, patch by patch.

    Patches are cut out one at a time as leaves of their own, and the layer is applied to each as a product; ∇_H L is
    what autograd puts on these leaves.
    """
    weight = layer.weight.detach().clone().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach()
    if isinstance(layer, nn.Linear):
        patches = x.detach().reshape(1, -1, x.shape[-1]).requires_grad_()
        out = patches[0] @ weight.T + (0 if bias is None else bias)
        loss = above(out.reshape(*x.shape[:-1], -1))
        matrices = weight[None]
    else:
        patches, places = _cut_patches(layer, x.detach())
        patches.requires_grad_()
        matrices = weight.reshape(layer.groups, weight.shape[0] // layer.groups, -1)
        rows = torch.stack([patches[g] @ matrices[g].T for g in range(layer.groups)], 1)  # (n·T, g, o)
        image = rows.reshape(len(x), -1, weight.shape[0]).transpose(1, 2).reshape(len(x), weight.shape[0], *places)
        if bias is not None:
            image = image + bias.reshape(-1, *[1] * len(places))
        loss = above(image)
    by_weight, by_patch = torch.autograd.grad(loss, [weight, patches])
    gradient = by_weight.reshape(matrices.shape)
    left = torch.stack([m.T @ d for m, d in zip(matrices.detach(), gradient, strict=True)])
    right = torch.stack([d.T @ h for d, h in zip(by_patch, patches.detach(), strict=True)])
    return left, right


def _cut_patches(layer, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """(g, n·T, channels/g · kernel) of a Conv2d, one patch at a time."""
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    ph, pw = layer.padding
    padded = nn.functional.pad(image, (pw, pw, ph, ph))
    height = (padded.shape[2] - dh * (kh - 1) - 1) // sh + 1
    width = (padded.shape[3] - dw * (kw - 1) - 1) // sw + 1
    per_group = image.shape[1] // layer.groups
    groups = []
    for g in range(layer.groups):
        rows = []
        for example in padded:
            for a in range(height):
                for b in range(width):
                    window = [
                        example[c, a * sh + i * dh, b * sw + j * dw]
                        for c in range(g * per_group, (g + 1) * per_group)
                        for i in range(kh)
                        for j in range(kw)
                    ]
                    rows.append(torch.stack(window))
        groups.append(torch.stack(rows))
    return torch.stack(groups), (height, width)


def reference_target_linearity(features: Tensor, targets: Tensor, center: bool = False, rcond: float = 1e-12) -> float:
    """``tr(Yᵀ P Y) / tr(YᵀY)`` with the n x n projector ``P = H H⁺``."""
    h, y = features.double().reshape(len(features), -1), targets.double().reshape(len(targets), -1)
    h = h - h.mean(0) if center else h
    y = y - y.mean(0)
    projector = h @ torch.linalg.pinv(h, rtol=rcond)
    return float(torch.trace(y.T @ projector @ y) / torch.trace(y.T @ y))


def reference_preserving(weight: Tensor, step: Tensor) -> Tensor:
    """``A W`` with ``S A + A S = D Wᵀ - W Dᵀ`` solved as one linear system of m² unknowns."""
    m = len(weight)
    gram, eye = weight @ weight.T, torch.eye(m, dtype=weight.dtype)
    system = torch.kron(gram, eye) + torch.kron(eye, gram)
    right = (step @ weight.T - weight @ step.T).reshape(-1)
    return (torch.linalg.pinv(system, rtol=1e-12) @ right).reshape(m, m) @ weight


def reference_turned(before: Tensor, after: Tensor) -> Tensor:
    """``Q W₂``, Q the polar factor ``(M Mᵀ)^{-1/2} M`` of a regular ``M = W₁W₂ᵀ``."""
    product = before @ after.T
    values, vectors = torch.linalg.eigh(product @ product.T)
    return (vectors * values.rsqrt()) @ vectors.T @ product @ after


def reference_agop(model: nn.Module, x: Tensor) -> Tensor:
    """``(1/n) Σ JᵀJ`` at the input, one example and one output at a time."""
    d = x[0].numel()
    total = torch.zeros(d, d, dtype=torch.float64)
    for example in x:
        leaf = example[None].clone().requires_grad_()
        for value in first_tensor(model(leaf)).reshape(-1):
            (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
            total += torch.outer(gradient.reshape(-1), gradient.reshape(-1)).double()
    return total / len(x)
