"""Gram matrices of the examples' loss gradients: which examples pull the same way."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.capture import capture
from gramscope.capture.network import Outputs, Precision, named_parameters, unwrap
from gramscope.kernels.accumulate import summed_rows
from gramscope.kernels.between_snapshots import snapshot_kernel
from gramscope.kernels.learning_rates import Rates, metric_by_name


def gradient_gram(
    model: nn.Module,
    x: ModelInput,
    residual: Float[Tensor, "n C"],
    *,
    metric: Rates = None,
    outputs: Outputs = None,
    frozen: bool = False,
    precision: Precision = None,
) -> dict[str, Float[Tensor, "n n"]]:
    """``Γ_{μν} = ⟨∂_θ ℓ_μ, D ∂_θ ℓ_ν⟩`` for each parameter, with ``∂_θ ℓ_μ = Σ_c e_{μc} ∂f_{μc}/∂θ``.

    ``Γ = Σ_{cd} e_{μc} K_{μc,νd} e_{νd}``, from one backward pass instead of one for each output. ``residual`` is
    ∂loss/∂f. ``metric`` is a diagonal D (a learning rate, a preconditioner): a number, numbers or tensors by parameter
    name (parameters that it does not name get zero), a flat tensor, or a function of (name, parameter). Numbers keep
    the fast contraction of :func:`gramscope.ntk`; a tensor needs the gradient of every example.

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
        own = named_parameters(unwrap(model))
        named = {name: real_view(own[name].detach()) for name in taken.parameters}
        weights = metric_by_name(metric, named)
        numbers = any(weight.dim() == 0 for weight in weights.values())
        found = snapshot_kernel(taken, reduce="trace", by_site=True) if numbers else {}
        for name, sites in taken.by_parameter().items():
            weight = weights[name]
            if weight.dim() == 0:
                found[name] *= float(weight)
            elif sites:
                rows = summed_rows(sites)[:, 0]
                found[name] = (rows * weight.expand(named[name].shape).to(rows).reshape(-1)) @ rows.T
            else:
                found[name] = taken.outputs.new_zeros(taken.examples, taken.examples)
        return found
