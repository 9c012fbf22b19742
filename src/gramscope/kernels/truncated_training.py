"""A network replaced by its Taylor polynomial in the parameters, and trained: linear, quadratic or cubic model.

    z(θ₀ + t) = f + J t + ½ ∂²f[t, t] + ⅙ ∂³f[t, t, t]                                        (11.150), (11.151)

The polynomial and its gradient are products with J, ``J̇ = D_t J`` and ``J̈ = D_t D_t J``: no tensor of features is
formed, so this is the form for networks whose ddNTKs do not fit into memory.
"""

from dataclasses import dataclass
from math import factorial
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_count, check_finite, check_lr, check_number
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.results import Result
from gramscope.kernels.expansion import Expansion, ExpansionOptions

RUNAWAY = 1e4  # times the first residual


@dataclass(frozen=True, eq=False, repr=False)
class TruncatedTraining(Result, shown=("converged", "steps", "residual")):
    """What gradient descent made of the Taylor polynomial: ``outputs`` on x, ``predicted`` on the probe.

    ``change`` is t, the way of the parameters; ``residual`` the largest |z - y| that is left after ``steps`` steps.
    """

    outputs: Float[Tensor, "n C"]
    predicted: Float[Tensor, "m C"]
    change: Float[Tensor, " p"]
    residual: float
    steps: int
    converged: bool


class TaylorPolynomial:
    """The outputs of a network as a polynomial of order 1, 2 or 3 in the change t of its parameters."""

    def __init__(self, expansion: Expansion, order: int) -> None:
        self.expansion, self.order = expansion, order

    def at(self, t: Float[Tensor, " p"]) -> tuple[Float[Tensor, "n C"], list[Expansion]]:
        """The outputs at ``θ₀ + t``, and the maps J, D_t J, D_t D_t J that their gradient needs."""
        maps = [self.expansion]
        while len(maps) < self.order:
            maps.append(maps[-1].tangent(t))
        f = self.expansion.f.detach().to(t)
        return f + sum((one @ t).reshape(f.shape) / factorial(k) for k, one in enumerate(maps, 1)), maps

    def pullback(self, maps: list[Expansion], residual: Float[Tensor, "n C"]) -> Float[Tensor, " p"]:
        """``(∂z/∂t)ᵀ ε = (J + J̇ + ½ J̈)ᵀ ε``."""
        found = [one.T @ residual.flatten() / factorial(k) for k, one in enumerate(maps)]
        return torch.stack(found).sum(dim=0)


@torch.inference_mode(False)
def train_truncated(
    model: nn.Module, x: ModelInput, y: Tensor, *, lr: float, order: int = 3, probe: ModelInput = None,
    steps: int = 10_000, tol: float = 1e-10, **options: Unpack[ExpansionOptions],
) -> TruncatedTraining:  # fmt: skip
    """Gradient descent on ``½ Σ (z - y)²``, z the Taylor polynomial of the network's outputs at its parameters.

    Order 1 is the linear model of infinite width, order 2 the quadratic model (11.150), order 3 the cubic model
    (11.151), which holds everything of order 1/n. The network itself is not changed. A step costs some 6, 30 and 80
    forward passes (``benchmarks/ddntk.py``); nothing larger than the parameters is held.

    Args:
        model: any module whose operations have ``order`` derivatives.
        x: the training examples; a tensor, a tuple or a dict.
        y: their targets (n, C).
        lr: the step η, with ``θ ← θ - η λ ∇``.
        order: 1, 2 or 3.
        probe: other examples to predict; those of x if None.
        steps: at most so many.
        tol: training ends where the largest |z - y| is below it.
        options: ``metric`` (λ) and others, as for ``dntk_velocity``.

    Reference: PDLT (arXiv:2106.10165) equations (11.144), (11.150), (11.151).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> x, y = torch.ones(1, 1), 2 * torch.ones(1, 1)
        >>> gs.kernels.train_truncated(model, x, y, lr=0.5, order=1, tol=1e-5).converged
        True
    """
    if order not in (1, 2, 3):
        raise InputError(f"order must be 1 (linear), 2 (quadratic) or 3 (cubic), got {order!r}.")
    lr, tol = check_lr(lr), check_number(tol, "tol", above=0.0)
    check_count(steps, "steps")
    at = Expansion(model, x, **options)
    polynomial, y = TaylorPolynomial(at, order), _targets(at, y)
    t, step = torch.zeros(at.cols.size, dtype=at.dtype, device=at.device), 0
    z, maps = polynomial.at(t)
    first = size = float((z - y).abs().max())
    while size > tol and step < steps:
        t = t - lr * (at.rates @ polynomial.pullback(maps, z - y))
        z, maps = polynomial.at(t)
        size, step = float((z - y).abs().max()), step + 1
        if not size <= RUNAWAY * first:
            raise InputError(f"training must converge, but ran away after {step} steps with lr={lr:g}. Lower lr.")
    predicted = z
    if probe is not None:
        predicted, _ = TaylorPolynomial(Expansion(model, probe, **options), order).at(t)
    return TruncatedTraining(z, predicted, t, size, step, size <= tol)


def _targets(at: Expansion, y: Tensor) -> Float[Tensor, "n C"]:
    if y.shape != at.f.shape:
        raise InputError(f"y must have the shape {tuple(at.f.shape)} of the outputs, got {tuple(y.shape)}.")
    check_finite(y, "y", "Remove or repair those targets.")
    return y.detach().to(dtype=at.dtype, device=at.device)
