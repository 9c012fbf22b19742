"""A torch network of this benchmark as a JAX function with the same weights, images as (n, h, w, c)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn

from models import Residual

Apply = Callable[[Any, jax.Array], jax.Array]


def twin(model: nn.Sequential, shape: torch.Size) -> tuple[Any, Apply]:
    """Parameters and a function ``apply(params, x)``; ``shape`` is one torch example's."""
    params, apply, _ = _sequential(model, torch.zeros(1, *shape, device=next(model.parameters()).device))
    return params, apply


def to_jax(x: Tensor) -> jax.Array:
    x = x.detach().cpu()
    return jnp.asarray((x.permute(0, 2, 3, 1) if x.ndim == 4 else x).contiguous().numpy())


def _sequential(model: nn.Sequential, probe: Tensor) -> tuple[Any, Apply, Tensor]:
    params, steps = [], []
    image: torch.Size | None = None
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Flatten):
                image = probe.shape[1:]
            p, step = _layer(layer, probe, image)
            if isinstance(layer, nn.Linear):
                image = None
            params.append(p)
            steps.append(step)
            probe = layer(probe)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for p, step in zip(params, steps, strict=True):
            x = step(p, x)
        return x

    return params, apply, probe


def _layer(layer: nn.Module, probe: Tensor, image: torch.Size | None) -> tuple[Any, Apply]:
    match layer:
        case nn.Linear():
            return _linear(layer, image)
        case nn.Conv2d():
            return _convolution(layer)
        case nn.BatchNorm2d():
            return _batch_norm(layer)
        case nn.ReLU():
            return (), lambda _, x: jax.nn.relu(x)
        case nn.Flatten():
            return (), lambda _, x: x.reshape(x.shape[0], -1)
        case nn.AdaptiveAvgPool2d():
            return (), lambda _, x: x.mean((1, 2), keepdims=True)
        case Residual():
            branch, on_branch, _ = _sequential(layer.branch, probe)
            shortcut, on_shortcut, _ = _sequential(layer.shortcut, probe)
            return (branch, shortcut), lambda p, x: jax.nn.relu(on_branch(p[0], x) + on_shortcut(p[1], x))
    raise TypeError(f"no JAX twin for {type(layer).__name__}. Add a case to benchmarks/twins.py.")


def _linear(layer: nn.Linear, image: torch.Size | None) -> tuple[Any, Apply]:
    weight = layer.weight.detach()
    if image is not None:
        # The kernel does not change with the order of parameters, so the columns follow JAX's flatten.
        weight = weight.reshape(-1, *image).permute(0, 2, 3, 1).reshape(len(weight), -1)
    return (_array(weight.T), _array(layer.bias)), lambda p, x: x @ p[0] + p[1]


def _convolution(layer: nn.Conv2d) -> tuple[Any, Apply]:
    padding = [(int(side), int(side)) for side in layer.padding]
    kernel = _array(layer.weight.permute(2, 3, 1, 0))

    def convolve(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, layer.stride, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    if layer.bias is None:
        return (kernel,), lambda p, x: convolve(p[0], x)
    return (kernel, _array(layer.bias)), lambda p, x: convolve(p[0], x) + p[1]


def _batch_norm(layer: nn.BatchNorm2d) -> tuple[Any, Apply]:
    mean = _array(layer.running_mean)
    inverse = _array(torch.rsqrt(layer.running_var + layer.eps))
    return (_array(layer.weight), _array(layer.bias)), lambda p, x: (x - mean) * inverse * p[0] + p[1]


def _array(value: Tensor) -> jax.Array:
    return jnp.asarray(value.detach().cpu().contiguous().numpy())
