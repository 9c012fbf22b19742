"""State-space layers: S4D, whose recurrence is the same at all times, and Mamba's, chosen by the input."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_count, check_number
from gramscope.base.errors import InputError
from gramscope.linalg.contraction import contract
from gramscope.propagators.scan import diagonal_scan, selective_scan


class S4D(nn.Module):
    """A bank of ``state_size`` damped oscillators for each unit: ``h' = A h + x``, ``y = 2 Re(C h) + D x``, A diagonal.

    In steps of Δ: ``h_t = e^{ΔA} h_{t-1} + A⁻¹(e^{ΔA} - 1) x_t`` (zero-order hold). ``A = -½ + iπn`` at the start, and
    ``read`` holds real and imaginary part of C's conjugate. It has no nonlinearity and does not mix its units: put an
    activation and a linear layer behind it. In :class:`GlobalNTK` h is the state ``h``, with axes (trial, time, unit,
    mode, part); the parts are real and imaginary.

    Reference: Gu, Gupta, Goel & Ré 2022 (arXiv:2206.11893), eqs. 2 and 3 and section 4 (S4D-Lin).

    >>> S4D(4, state_size=3)(torch.randn(2, 10, 4)).shape
    torch.Size([2, 10, 4])
    """

    def __init__(self, width: int, state_size: int = 16, *, dt: float = 0.1) -> None:
        super().__init__()
        width, modes = check_count(width, "width"), check_count(state_size, "state_size")
        check_number(dt, "dt", above=0.0)
        self.log_step = nn.Parameter(torch.full((width,), math.log(dt)) + 0.5 * torch.randn(width))
        self.log_decay = nn.Parameter(torch.full((width, modes), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(float(modes)).repeat(width, 1))
        self.read = nn.Parameter(torch.randn(width, modes, 2) / math.sqrt(2 * modes))
        self.skip = nn.Parameter(torch.randn(width))

    def forward(self, x: Float[Tensor, "trial time unit"]) -> Float[Tensor, "trial time unit"]:
        _check_units(x, len(self.skip))
        A = torch.complex(-self.log_decay.exp(), self.frequency)
        a = torch.exp(self.log_step.exp()[:, None] * A)
        h = diagonal_scan(a, x[..., None] * ((a - 1) / A))
        y = contract("trial time unit mode part, unit mode part -> trial time unit", torch.view_as_real(h), self.read)
        return 2 * y + self.skip * x


class SelectiveSSM(nn.Module):
    """Mamba's recurrence: ``h_t = e^{Δ_t A} h_{t-1} + Δ_t B_t x_t``, ``y_t = C_t h_t + D x_t``; Δ, B, C from x.

    A is real, ``-1..-state_size`` at the start; ``rank`` is that of the map from x to Δ. In :class:`GlobalNTK` h is the
    state ``h``, with axes (trial, time, unit, mode); the projections are states too. A block of Mamba puts a gate and a
    short convolution around it.

    Reference: Gu & Dao 2023 (arXiv:2312.00752), algorithm 2 and section 3.6.

    >>> SelectiveSSM(4, state_size=3)(torch.randn(2, 10, 4)).shape
    torch.Size([2, 10, 4])
    """

    def __init__(self, width: int, state_size: int = 16, *, rank: int | None = None) -> None:
        super().__init__()
        width, modes = check_count(width, "width"), check_count(state_size, "state_size")
        self.modes = modes
        self.rank = check_count(rank if rank is not None else math.ceil(width / 16), "rank")
        self.project = nn.Linear(width, self.rank + 2 * modes, bias=False)
        self.steps = nn.Linear(self.rank, width)
        self.log_decay = nn.Parameter(torch.arange(1.0, modes + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "trial time unit"]) -> Float[Tensor, "trial time unit"]:
        _check_units(x, len(self.skip))
        low, B, C = self.project(x).split([self.rank, self.modes, self.modes], dim=-1)
        h = selective_scan(x, F.softplus(self.steps(low)), -self.log_decay.exp(), B)
        return (h * C[:, :, None]).sum(-1) + self.skip * x


def _check_units(x: Tensor, width: int) -> None:
    if x.dim() != 3 or x.shape[2] != width:
        raise InputError(f"x must have axes (trial, time, unit) with {width} units, got shape {tuple(x.shape)}.")
