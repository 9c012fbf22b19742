"""The two ddNTKs of a real network: how its dNTK moves, and the η³ term of its outputs.

    ddI_{i0 i1 i2 i3}  = Σ λ_μ λ_ν λ_ρ (∂³f_{i0}/∂θ_μ∂θ_ν∂θ_ρ) (∂f_{i1}/∂θ_μ) (∂f_{i2}/∂θ_ν) (∂f_{i3}/∂θ_ρ)
    ddII_{i1 i2 i3 i4} = Σ λ_μ λ_ν λ_ρ (∂²f_{i1}/∂θ_μ∂θ_ν) (∂²f_{i2}/∂θ_μ∂θ_ρ) (∂f_{i3}/∂θ_ν) (∂f_{i4}/∂θ_ρ)

with i = (example, output) and a diagonal learning-rate tensor λ: the combinations ``Ψφ³`` and ``ψ²φ²`` of (11.153).
Contracted with vectors over the outputs they are derivatives along ``u = λ Jᵀ a``: three for the first,
``(D_u J) λ (D_w J)ᵀ`` for the second. Neither a third derivative (U P³) nor a Hessian (U P²) is formed.
"""

from typing import NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.memory_budget import Memory, check_budget
from gramscope.base.nested import ModelInput
from gramscope.base.progress_bar import progress
from gramscope.kernels.derivatives import derivative, step_direction
from gramscope.kernels.expansion import Expansion, ExpansionOptions
from gramscope.kernels.kernel_velocity import Residual, read_step
from gramscope.linalg import LinearOperator


class DenseDDNTK(NamedTuple):
    """All entries of both ddNTKs over U = n·C outputs: ``first[i0, i1, i2, i3]`` and ``second[i1, i2, i3, i4]``."""

    first: Float[Tensor, "u u u u"]
    second: Float[Tensor, "u u u u"]

    def __repr__(self) -> str:
        return f"DenseDDNTK(first and second, {len(self.first)} outputs on each of their four axes)"


class DDNTK:
    """Both ddNTKs of a network on fixed examples: contracted with vectors (matrix-free), or dense for small networks.

    Vectors are over (example, output), of shape (n, C) or flattened. Options are those of ``dntk_velocity``, λ with
    them; ``check`` compares third derivatives by forward and by backward mode.

    Reference: PDLT (arXiv:2106.10165) equations (11.151) to (11.153).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
        >>> found = gs.kernels.DDNTK(model, torch.randn(4, 2).double())
        >>> a = torch.randn(4, 1).double()
        >>> first = torch.einsum("ijkl,j,k,l->i", found.dense().first, *[a[:, 0]] * 3)
        >>> bool(torch.allclose(found.first(a, a, a)[:, 0], first))
        True
    """

    @torch.inference_mode(False)
    def __init__(
        self, model: nn.Module, x: ModelInput, *, check: bool = True, **options: Unpack[ExpansionOptions]
    ) -> None:
        self.expansion, self.check = Expansion(model, x, **options), check

    def __repr__(self) -> str:
        return f"DDNTK({self.expansion.rows!r}, {self.expansion.cols.size} parameters)"

    @torch.inference_mode(False)
    def first(self, a: Tensor, b: Tensor, c: Tensor) -> Float[Tensor, "n C"]:
        """``Σ_{jkl} ddI_{i j k l} a_j b_k c_l``: a third derivative of the outputs along three directions."""
        u, v, w = (step_direction(self.expansion, *named) for named in ((a, "a"), (b, "b"), (c, "c")))
        return derivative(self.expansion.tangent(u).tangent(v), w, self.check)

    @torch.inference_mode(False)
    def second(self, a: Tensor, b: Tensor) -> LinearOperator:
        """``Σ_{kl} ddII_{i j k l} a_k b_l``, a matrix over pairs of outputs, as an operator; ``.dense()`` forms it.

        It is ``(D_u J) λ (D_w J)ᵀ`` with ``u = λ Jᵀ a``, ``w = λ Jᵀ b``.
        """
        left = self.expansion.tangent(step_direction(self.expansion, a, "a"))
        right = left if b is a else self.expansion.tangent(step_direction(self.expansion, b, "b"))
        return left.times(right)

    @torch.inference_mode(False)
    def dense(self, memory: Memory = None) -> DenseDDNTK:
        """All U⁴ entries of both; U²/2 graphs of second derivatives are built, so for a few dozen outputs."""
        size, parameters = self.expansion.rows.size, self.expansion.cols.size
        check_budget(
            (2 * size**4 + size * (size + 2) * parameters) * self.expansion.dtype.itemsize, memory,
            self.expansion.device,
            f"2 x {size}⁴ entries of the ddNTKs and {size}² gradients of {parameters} parameters",
            "Take fewer examples or outputs, or the contracted forms, which hold neither: DDNTK.first(a, b, c), "
            "DDNTK.second(a, b), output_third_order and ntk_acceleration for one step, train_truncated for a whole "
            "training.",
        )  # fmt: skip
        directions = self.expansion.directions()
        if self.check:
            total = directions.sum(dim=1)
            derivative(self.expansion.tangent(total).tangent(total), total)
        first = directions.new_zeros((size,) * 4)
        turned = directions.new_zeros(size, size, parameters)  # [k, i, μ] = (∂²f_i u_k)_μ
        with progress("ddNTK, direction", size) as advance:
            for j in range(size):
                tangent = self.expansion.tangent(directions[:, j])
                turned[j] = tangent.dense()
                for k in range(j, size):
                    _fill(first, j, k, tangent.tangent(directions[:, k]) @ directions[:, k:])
                advance()
        return DenseDDNTK(first, torch.einsum("kim,m,ljm->ijkl", turned, self.expansion.rates.diagonal, turned))


def _fill(first: Float[Tensor, "u u u u"], j: int, k: int, found: Float[Tensor, "u m"]) -> None:
    """Entries [:, j, k, k:], and what they are equal to: a third derivative knows no order."""
    for place in range(found.shape[1]):
        value, last = found[:, place], k + place
        for a, b, c in ((j, k, last), (j, last, k), (k, j, last), (k, last, j), (last, j, k), (last, k, j)):
            first[:, a, b, c] = value


@torch.inference_mode(False)
def output_third_order(
    model: nn.Module, x: ModelInput, residual: Residual, *, probe: ModelInput = None,
    check: bool = True, **options: Unpack[ExpansionOptions],
) -> Float[Tensor, "n C"]:  # fmt: skip
    """The η³ term of the outputs, ``f(η) = f - η K ε + η²·curvature + η³·third + O(η⁴)`` under a gradient step.

    ``third_i = -(1/6) Σ_{jkl} ddI_{i j k l} ε_j ε_k ε_l``; the factor -1/6 is inside. ``curvature`` is that of
    ``output_curvature``, whose arguments these are.

    Reference: PDLT (arXiv:2106.10165), section 11.4.3, the ``O(η³)`` terms before (11.151).

    Example:
        >>> import torch, gramscope as gs
        >>> class Cube(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.tensor([1.0]))
        ...     def forward(self, x):
        ...         return self.w**3 * x
        >>> gs.kernels.output_third_order(Cube(), torch.ones(1, 1), torch.ones(1, 1)).item()  # (1 - 3η)³ ends in -27η³
        -27.0
    """
    at, direction = read_step(model, x, residual, probe, options)
    return derivative(at.tangent(direction).tangent(direction), direction, check) / -6


@torch.inference_mode(False)
def ntk_acceleration(
    model: nn.Module, x: ModelInput, residual: Residual, *, probe: ModelInput = None,
    check: bool = True, **options: Unpack[ExpansionOptions],
) -> LinearOperator:  # fmt: skip
    """The kernel's second derivative along a step, ``K(η) = K + η·velocity + ½ η²·acceleration + O(η³)``.

    ``acceleration_{i1 i2} = Σ_{jk} (ddI_{i1 i2 j k} + ddI_{i2 i1 j k} + 2 ddII_{i1 i2 j k}) ε_j ε_k``: all of both
    ddNTKs that the kernel feels of one step. An operator over (example, output), flattened; ``.dense()`` forms it.
    It is ``J̈ λ Jᵀ + 2 J̇ λ J̇ᵀ + J λ J̈ᵀ``, dots being derivatives along the step. Arguments are those of
    ``dntk_velocity``.

    Reference: PDLT (arXiv:2106.10165) equations (11.151) to (11.153).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(1, 1, bias=False)          # f = w x: the kernel x x' does not move
        >>> gs.kernels.ntk_acceleration(model, torch.ones(2, 1), torch.ones(2, 1)).dense().abs().max().item()
        0.0
    """
    at, direction = read_step(model, x, residual, probe, options)
    once = at.tangent(direction)
    twice = once.tangent(direction)
    if check:
        derivative(twice, direction)
    return twice.times(at) + 2.0 * once.times(once) + at.times(twice)
