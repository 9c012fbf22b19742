"""The dNTK of a real network: how its tangent kernel moves under a step, and the η² term of its outputs.

    dH_{i0 i1 i2} = Σ λ_μ λ_ν (∂²f_{i0}/∂θ_μ∂θ_ν) (∂f_{i1}/∂θ_μ) (∂f_{i2}/∂θ_ν)                              (11.8)

with i = (example, output) and a diagonal learning-rate tensor λ. Neither dH (U³) nor the Hessian (U P²) is formed: a
step of residual ε moves θ along ``-v``, ``v = λ Jᵀε``, and everything of dH that a step feels is a derivative along v.
"""

import math
from collections.abc import Callable
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.memory_budget import Memory, check_budget
from gramscope.base.nested import ModelInput
from gramscope.base.progress_bar import progress
from gramscope.kernels.dense import dense_velocity
from gramscope.kernels.derivatives import checked_tangent, derivative, step_direction
from gramscope.kernels.expansion import Expansion, ExpansionOptions
from gramscope.linalg import LinearOperator

Residual = Tensor | Callable[[Tensor], Tensor]


@torch.inference_mode(False)
def dntk_velocity(
    model: nn.Module, x: ModelInput, residual: Residual, *, probe: ModelInput = None,
    memory: Memory = None, check: bool = True, **options: Unpack[ExpansionOptions],
) -> Float[Tensor, "n C n C"]:  # fmt: skip
    """The tangent kernel's rate of change under a gradient step, ``K(η) = K + η·velocity + O(η²)``.

    ``velocity_{i1 i2} = -Σ_j (dH_{i1 i2 j} + dH_{i2 i1 j}) ε_j``, with the step ``θ ← θ - η λ ∇loss`` and
    ``K = J λ Jᵀ``. Computed as ``-(J̇ λ Jᵀ + J λ J̇ᵀ)``, J̇ the derivative of the Jacobian along ``λ Jᵀ ε``.

    Args:
        model: any module whose operations have second derivatives.
        x: the examples of the step; a tensor, a tuple or a dict.
        residual: ``∂loss/∂f`` (n, C), or the loss itself as a function of the outputs.
        probe: the examples whose kernel is watched; those of the step if None.
        memory: bytes to stay within; half of what is free if None.
        check: compare second derivatives along the step by backward and by forward mode; where they differ, and no
            difference of first derivatives confirms the backward ones, refuse. Networks of operations whose formulas
            are tested (``gramscope.ops.operations.PROVEN``) need no comparison.
        options: ``metric``, the learning-rate tensor λ: a number, numbers or tensors by parameter name (others get
            zero), a function of (name, parameter), or one flat tensor; ``gs.kernels.layer_rates`` makes λ_b and
            λ_W/fan-in. And ``outputs``, ``frozen``, ``precision``, ``kink``, ``bandwidth``; see ``ExpansionOptions``.
            With the default kink="autograd" a ReLU has σ'' = 0: ``kink_crossings`` has the part of its kinks.

    Reference: PDLT (arXiv:2106.10165) equation (11.10).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(1, 1, bias=False)          # f = w x: the kernel x x' does not move
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> gs.kernels.dntk_velocity(model, x, torch.ones(2, 1)).abs().max().item()
        0.0
    """
    at, direction = read_step(model, x, residual, probe, options)
    velocity = -dense_velocity(checked_tangent(at, direction, check), memory)
    return velocity.reshape(*at.rows.shape, *at.rows.shape)


@torch.inference_mode(False)
def dntk_velocity_operator(
    model: nn.Module, x: ModelInput, residual: Residual, *, probe: ModelInput = None,
    check: bool = True, **options: Unpack[ExpansionOptions],
) -> LinearOperator:  # fmt: skip
    """The velocity of ``dntk_velocity`` as an operator on vectors over (example, output), flattened.

    A product differentiates ``θ ↦ J λ Jᵀ w`` along the step: four traversals of graphs that are built once. Nothing
    of size U x P or U x U is held.

    Reference: PDLT (arXiv:2106.10165) equation (11.10).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> x, residual = torch.randn(4, 2), torch.randn(4, 1)
        >>> operator = gs.kernels.dntk_velocity_operator(model, x, residual)
        >>> velocity = gs.kernels.dntk_velocity(model, x, residual).reshape(4, 4)
        >>> bool(torch.allclose(operator.dense(), velocity, atol=1e-5))
        True
    """
    at, direction = read_step(model, x, residual, probe, options)
    tangent = checked_tangent(at, direction, check)
    return -(tangent.times(at) + at.times(tangent))


@torch.inference_mode(False)
def output_curvature(
    model: nn.Module, x: ModelInput, residual: Residual, *, probe: ModelInput = None,
    check: bool = True, **options: Unpack[ExpansionOptions],
) -> Float[Tensor, "n C"]:  # fmt: skip
    """The η² term of the outputs under a gradient step, ``f(η) = f - η K ε + η²·curvature + O(η³)``.

    ``curvature_i = ½ Σ_{jk} dH_{i j k} ε_j ε_k = ½ v·H_i v`` with ``v = λ Jᵀ ε``: a second derivative along one
    direction. The factor ½ is inside. Arguments are those of ``dntk_velocity``.

    Reference: PDLT (arXiv:2106.10165) equation (11.9).

    Example:
        >>> import torch, gramscope as gs
        >>> class Square(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.tensor([3.0]))
        ...     def forward(self, x):
        ...         return self.w**2 * x
        >>> gs.kernels.output_curvature(Square(), torch.ones(1, 1), torch.ones(1, 1)).item()  # (3 - 6η)² ends in 36η²
        36.0
    """
    at, direction = read_step(model, x, residual, probe, options)
    return 0.5 * derivative(at.tangent(direction), direction, check)


@torch.inference_mode(False)
def dntk(
    model: nn.Module, x: ModelInput, x1: ModelInput = None, x2: ModelInput = None, *, memory: Memory = None,
    check: bool = True, **options: Unpack[ExpansionOptions],
) -> Float[Tensor, "n0 C n1 C n2 C"]:  # fmt: skip
    """The differential of the tangent kernel, all U³ entries, for small problems.

    ``dH_{i0 i1 i2} = Σ λ_μ λ_ν (∂²f_{i0}/∂θ_μ∂θ_ν)(∂f_{i1}/∂θ_μ)(∂f_{i2}/∂θ_ν)``: the Hessian is that of the outputs
    on ``x``, the gradients those on ``x1`` and ``x2`` (both x if None). Symmetric in the last two places.

    Reference: PDLT (arXiv:2106.10165) equation (11.8).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> gs.kernels.dntk(model, torch.randn(4, 2)).shape
        torch.Size([4, 1, 4, 1, 4, 1])
    """
    at = Expansion(model, x, **options)
    at1 = at if x1 is None else Expansion(model, x1, **options)
    at2 = at1 if x2 is None else Expansion(model, x2, **options)
    sizes = [one.rows.size for one in (at, at1, at2)]
    check_budget(
        (math.prod(sizes) + 2 * at.cols.size * max(sizes)) * at.dtype.itemsize, memory, at.device,
        f"{sizes[0]} x {sizes[1]} x {sizes[2]} entries of the dNTK and the gradients of {at.cols.size} parameters",
        "Take fewer examples or outputs, or the contracted forms dntk_velocity and output_curvature.",
    )  # fmt: skip
    first, second = at1.directions(), at2.directions() if at2 is not at1 else None
    checked_tangent(at, first.sum(dim=1), check)
    result = torch.zeros(sizes[1], sizes[0], sizes[2], dtype=at.dtype, device=at.device)
    with progress("dNTK, direction", sizes[1]) as advance:
        for j in range(sizes[1]):
            start = j if second is None else 0
            result[j, :, start:] = at.tangent(first[:, j]) @ (first if second is None else second)[:, start:]
            advance()
    if second is None:
        for j in range(sizes[1]):
            result[j + 1 :, :, j] = result[j, :, j + 1 :].T
    shapes = [one.rows.shape for one in (at, at1, at2)]
    return result.transpose(0, 1).reshape(*shapes[0], *shapes[1], *shapes[2])


def read_step(
    model: nn.Module, x: ModelInput, residual: Residual, probe: ModelInput, options: ExpansionOptions
) -> tuple[Expansion, Float[Tensor, " p"]]:
    """The watched expansion, and the direction ``λ Jᵀ ε`` of the step."""
    at = Expansion(model, x, **options)
    direction = step_direction(at, residual)
    return at if probe is None else Expansion(model, probe, **options), direction
