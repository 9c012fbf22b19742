"""Neural ODEs ``dh/dt = f(t, h)`` with solvers of fixed steps, whose states are h at the times of a grid."""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_count, check_finite, check_tensor
from gramscope.base.errors import InputError

Solver = Literal["euler", "midpoint", "rk4"]
Slope = Callable[[Tensor, Tensor], Tensor]  # (t, h) -> dh/dt

ADAPTIVE = {
    "adaptive_heun", "bdf", "bosh3", "dopri5", "dopri8", "fehlberg2", "lsoda", "radau", "rk23", "rk45", "scipy_solver",
    "tsit5",
}  # fmt: skip


def euler(slope: Slope, t: Tensor, dt: Tensor, h: Tensor) -> Tensor:
    """First order: ``h + dt f(t, h)``."""
    return h + dt * slope(t, h)


def midpoint(slope: Slope, t: Tensor, dt: Tensor, h: Tensor) -> Tensor:
    """Second order: the slope in the middle of an Euler step."""
    return h + dt * slope(t + dt / 2, h + dt / 2 * slope(t, h))


def rk4(slope: Slope, t: Tensor, dt: Tensor, h: Tensor) -> Tensor:
    """Fourth order: the method of Runge and Kutta."""
    first = slope(t, h)
    second = slope(t + dt / 2, h + dt / 2 * first)
    third = slope(t + dt / 2, h + dt / 2 * second)
    fourth = slope(t + dt, h + dt * third)
    return h + dt / 6 * (first + 2 * second + 2 * third + fourth)


SOLVERS: dict[str, Callable[[Slope, Tensor, Tensor, Tensor], Tensor]] = {
    "euler": euler, "midpoint": midpoint, "rk4": rk4
}  # fmt: skip


class NeuralODE(nn.Module):
    """``dh/dt = derivative(t, h)`` from ``h0``, at given times; or ``derivative(t, h, x_t)``, driven by inputs.

    ``NeuralODE(...)(h0)`` is h at ``times[1:]``, (trial, time, ...). :class:`GlobalNTK` takes these as its states: one
    step of the grid is ``s_{k+1} = Φ(s_k, θ)``, P the product of the steps' Jacobians (the propagator of the linearised
    flow), K the effect of the parameters within one step. All is the derivative of the solver's own steps, exact for
    the numbers that it gives out.

    Args:
        derivative: takes t, a scalar tensor, and h (trial, ...), and gives dh/dt; with inputs it takes x_t as well.
        times: the grid (T + 1,), rising or falling; ``times[0]`` is the time of h0.
        solver: "euler", "midpoint" or "rk4". Adaptive solvers are refused: they choose their steps by the states.
        substeps: steps of the solver between two times of the grid.
        adjoint: train by the adjoint equation (Chen et al. 2018, arXiv:1806.07366, section 2), which keeps only h at
            the grid and solves backward in time. Its gradient differs from that of the solver's steps by the solver's
            error. :class:`GlobalNTK` takes the exact route, through the steps, whatever is set here.

    Example:
        >>> linear = nn.Linear(2, 2, bias=False).double()
        >>> ode = NeuralODE(Autonomous(linear), torch.linspace(0, 1, 5).double())
        >>> h0 = torch.ones(3, 2).double()
        >>> exact = h0 @ torch.linalg.matrix_exp(linear.weight).mT
        >>> ode(h0).shape, bool(torch.allclose(ode(h0)[:, -1], exact, atol=1e-4))
        (torch.Size([3, 4, 2]), True)
    """

    def __init__(
        self,
        derivative: nn.Module,
        times: Float[Tensor, " grid"],
        *,
        solver: Solver = "rk4",
        substeps: int = 1,
        adjoint: bool = False,
    ) -> None:
        super().__init__()
        _check_solver(solver)
        if check_tensor(times, "times").dim() != 1 or len(times) < 2 or not times.is_floating_point():
            raise InputError(f"times must be two numbers or more, (T + 1,), got shape {tuple(times.shape)}.")
        check_finite(times, "times", "Pass e.g. torch.linspace(0, 1, 11).")
        gaps = times.diff()
        if not bool((gaps > 0).all() or (gaps < 0).all()):
            raise InputError("times must rise, or fall, from each to the next. Sort them and drop repeated ones.")
        self.derivative, self.solver, self.adjoint = derivative, solver, adjoint
        self.substeps = check_count(substeps, "substeps")
        self.register_buffer("times", times.detach().clone())
        self.times: Tensor

    @property
    def steps(self) -> int:
        """T, the number of states."""
        return len(self.times) - 1

    def forward(
        self, h0: Float[Tensor, "trial ..."], x: Float[Tensor, "trial time ..."] | None = None
    ) -> Float[Tensor, "trial time ..."]:
        self.check_inputs(h0, x)
        if self.adjoint:
            learnt = [p for p in self.parameters() if p.requires_grad]
            return cast(Tensor, _Adjoint.apply(self, h0, x, *learnt))  # type: ignore[no-untyped-call]
        return self.trajectory(h0, x)

    def trajectory(self, h0: Float[Tensor, "trial ..."], x: Tensor | None = None) -> Float[Tensor, "trial time ..."]:
        """The solver's steps, one after another."""
        states = []
        for k in range(self.steps):
            h0 = self.step(k, h0, None if x is None else x[:, k])
            states.append(h0)
        return torch.stack(states, dim=1)

    def step(self, k: int, h: Float[Tensor, "trial ..."], x: Tensor | None = None) -> Float[Tensor, "trial ..."]:
        """h at ``times[k + 1]`` from h at ``times[k]``; the input is constant in between."""

        def slope(t: Tensor, h: Tensor) -> Tensor:
            found: Tensor = self.derivative(t, h) if x is None else self.derivative(t, h, x)
            return found

        return self._across(slope, k, h)

    def _across(self, slope: Slope, k: int, h: Tensor, backward: bool = False) -> Tensor:
        """Any equation over one interval of the grid, or over it backward in time."""
        start, end = (self.times[k + 1], self.times[k]) if backward else (self.times[k], self.times[k + 1])
        dt = (end - start) / self.substeps
        for i in range(self.substeps):
            h = SOLVERS[self.solver](slope, start + i * dt, dt, h)
        return h

    def check_inputs(self, h0: Tensor, x: Tensor | None) -> None:
        """Raise where the initial states or the inputs do not fit the grid."""
        if h0.dim() < 2:
            raise InputError(f"h0 must have axes (trial, ...), got shape {tuple(h0.shape)}. Add a batch axis.")
        if x is not None and (x.dim() < 2 or tuple(x.shape[:2]) != (len(h0), self.steps)):
            raise InputError(
                f"x must have an input for each of {len(h0)} trials and {self.steps} steps, (trial, time, ...), got "
                f"shape {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        return f"times={self.steps + 1}, solver={self.solver!r}, substeps={self.substeps}, adjoint={self.adjoint}"


class Autonomous(nn.Module):
    """A module ``h -> dh/dt`` as a derivative that takes the time as well, and does not use it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        found: Tensor = self.module(h)
        return found


def take_exact_route(model: nn.Module) -> None:
    """Every neural ODE in ``model`` through its solver's steps instead of the adjoint equation; in place."""
    for module in model.modules():
        if isinstance(module, NeuralODE):
            module.adjoint = False


def _check_solver(solver: str) -> None:
    if solver in SOLVERS:
        return
    known = ", ".join(repr(name) for name in SOLVERS)
    if isinstance(solver, str) and solver.lower() in ADAPTIVE:
        raise InputError(
            f"solver must have fixed steps ({known}), but {solver!r} is adaptive: its steps depend on the states, "
            "so the set of states changes with the parameters. Take 'rk4' and as many substeps as "
            f"{solver!r} took on average."
        )
    raise InputError(f"solver must be one of {known}, got {solver!r}.")


class _Adjoint(torch.autograd.Function):
    """h at the grid; gradients from the adjoint equation ``da/dt = -aᵀ ∂f/∂h``, ``dg/dt = -aᵀ ∂f/∂(θ, x)``."""

    @staticmethod
    def forward(ctx: Any, ode: NeuralODE, h0: Tensor, x: Tensor | None, *parameters: Tensor) -> Tensor:
        states = ode.trajectory(h0, x)  # autograd does not look inside
        ctx.ode, ctx.parameters = ode, parameters
        ctx.save_for_backward(h0, x, states)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        h0, x, states = ctx.saved_tensors
        ode: NeuralODE = ctx.ode
        adjoint = torch.zeros_like(h0)
        found = [torch.zeros_like(p) for p in ctx.parameters]
        inputs = [] if x is None else [torch.zeros_like(x[:, 0]) for _ in range(ode.steps)]
        for k in reversed(range(ode.steps)):
            adjoint = adjoint + gradient[:, k]
            driven = [] if x is None else [x[:, k]]
            still = [*ctx.parameters, *driven]
            adjoint, *moved = _solve_backward(ode, k, states[:, k], adjoint, driven, still)
            found = [old + new for old, new in zip(found, moved, strict=False)]
            if x is not None:
                inputs[k] = moved[-1]
        return None, adjoint, torch.stack(inputs, dim=1) if inputs else None, *found


def _solve_backward(
    ode: NeuralODE, k: int, h: Tensor, adjoint: Tensor, driven: list[Tensor], still: list[Tensor]
) -> list[Tensor]:
    """The adjoints of h, of the parameters and of the input at the start of interval k, from those at its end."""
    parts = [h, adjoint, *(torch.zeros_like(value) for value in still)]
    sizes = [part.numel() for part in parts]

    def slope(t: Tensor, joint: Tensor) -> Tensor:
        h, a = (flat.view_as(part) for flat, part in zip(joint.split(sizes)[:2], parts[:2], strict=True))
        with torch.enable_grad():
            held = [h.detach().requires_grad_(), *(x.detach().requires_grad_() for x in driven)]
            dh = ode.derivative(t, *held)
            wanted = [held[0], *still[: len(still) - len(driven)], *held[1:]]
            grads = torch.autograd.grad(dh, wanted, a, allow_unused=True) if dh.requires_grad else [None] * len(wanted)
        moved = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]
        return torch.cat([dh.detach().reshape(-1), *(-part.reshape(-1) for part in moved)])

    end = ode._across(slope, k, torch.cat([part.reshape(-1) for part in parts]), backward=True)
    return [flat.view_as(part) for flat, part in zip(end.split(sizes)[1:], parts[1:], strict=True)]
