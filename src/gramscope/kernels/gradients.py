"""Gram matrices of the examples' loss gradients: which examples pull the same way."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.errors import InputError
from gramscope.capture import capture
from gramscope.capture.network import Outputs
from gramscope.capture.precision import Precision
from gramscope.capture.surroundings import exact_arithmetic
from gramscope.kernels.assemble import summed_rows
from gramscope.kernels.ntk import contracted


def gradient_gram(
    model: nn.Module,
    x: Any,
    residual: Float[Tensor, "n C"],
    *,
    metric: Mapping[str, Tensor | float] | None = None,
    outputs: Outputs = None,
    frozen: bool = False,
    precision: Precision = None,
) -> dict[str, Float[Tensor, "n n"]]:
    """``Γ_{μν} = ⟨∂_θ ℓ_μ, D ∂_θ ℓ_ν⟩`` for each parameter, with ``∂_θ ℓ_μ = Σ_c e_{μc} ∂f_{μc}/∂θ``.

    ``Γ = Σ_{cd} e_{μc} K_{μc,νd} e_{νd}``, from one backward pass instead of one for each output. ``residual`` is
    ∂loss/∂f. ``metric`` is a diagonal D by parameter name (a learning rate, a preconditioner); parameters that it does
    not name get zero. A number keeps the fast contraction of :func:`gramscope.ntk`; a tensor needs the gradient of
    every example.

    Example:
        >>> import torch, gramscope as gs
        >>> gs.kernels.gradient_gram(torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.ones(2, 1))
        {'weight': tensor([[1., 0.],
                [0., 1.]])}
    """
    if residual.dim() != 2:
        raise InputError(f"residual must have shape (n, C), got {tuple(residual.shape)}. Flatten the outputs.")
    taken = capture(model, x, outputs=outputs, directions=residual.detach()[None], frozen=frozen, precision=precision)
    with torch.no_grad(), exact_arithmetic(tf32=precision == "tf32"):
        if metric is None:
            return contracted(taken, trace=True, by_site=True)
        unknown = sorted(set(metric) - set(taken.parameters))
        if unknown:
            raise InputError(f"metric: no parameter is called {unknown[0]!r}; there are {', '.join(taken.parameters)}.")
        found: dict[str, Tensor] = {}
        plain = contracted(taken, trace=True, by_site=True) if _any_numbers(metric) else {}
        for name, sites in taken.by_parameter().items():
            weight = metric.get(name, 0.0)
            if isinstance(weight, Tensor) and weight.dim() > 0 and sites:
                rows = summed_rows(sites)[:, 0]
                found[name] = (rows * weight.to(rows).reshape(-1)) @ rows.T
            else:
                kernel = plain.get(name)
                zero = taken.outputs.new_zeros(taken.examples, taken.examples)
                found[name] = zero if kernel is None or not sites else float(weight) * kernel
        return found


def _any_numbers(metric: Mapping[str, Tensor | float]) -> bool:
    return any(not isinstance(weight, Tensor) or weight.dim() == 0 for weight in metric.values())
