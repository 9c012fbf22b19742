"""Networks whose backward pass is right, but cannot be differentiated in its cotangent: custom functions, adjoint
solvers, implicit layers. ``Jᵀ c`` is exact there; a second backward pass through it is not ``J v``."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zoo.case import Call, normal, registry, weight

CASES, case = registry()


class DetachedTanh(torch.autograd.Function):
    """The cotangent is detached: a second backward pass silently sees nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g.detach() * (1 - y**2)


class OnceTanh(DetachedTanh):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y**2)


class NumpyTanh(DetachedTanh):
    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return torch.from_numpy(np.asarray(g.detach() * (1 - y.detach() ** 2)))


class DetachedLinear(torch.autograd.Function):
    """The gradient of the weight alone loses its link: the part of one parameter drops out symmetrically."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.detach().T @ x


class AdjointEuler(torch.autograd.Function):
    """h' = tanh(W h), ten Euler steps, with the gradient of exactly these steps by its own backward recursion."""

    @staticmethod
    def forward(ctx, h, w):
        states = [h]
        for _ in range(10):
            states.append(states[-1] + 0.1 * (states[-1] @ w.T).tanh())
        ctx.save_for_backward(w, *states[:-1])
        return states[-1]

    @staticmethod
    def backward(ctx, g):
        w, *states = ctx.saved_tensors
        a, total = g, torch.zeros_like(w)
        with torch.enable_grad():
            for state in reversed(states):
                here, copy = state.detach().requires_grad_(), w.detach().requires_grad_()
                step = here + 0.1 * (here @ copy.T).tanh()
                a, more = torch.autograd.grad(step, (here, copy), a)
                total = total + more
        return a, total


class Recomputed(torch.autograd.Function):
    """Calls its module again in the backward pass, as adjoint solvers and home-made checkpoints do."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            here = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(here), (here, *parameters), g, allow_unused=True)
        return None, *found


class Equilibrium(nn.Module):
    """z = tanh(W z + U x): found without gradients, differentiated by a hook that solves the adjoint equation."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.head = weight(4, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w / (2 * self.w.detach().norm())
        z = x.new_zeros(len(x), 4)
        with torch.no_grad():
            for _ in range(80):
                z = (z @ w.T + self.u(x)).tanh()
        z = (z @ w.T + self.u(x)).tanh()
        here = z.detach().requires_grad_()
        again = (here @ w.detach().T + self.u(x).detach()).tanh()

        def solve(g: Tensor) -> Tensor:
            total = g
            for _ in range(80):
                total = g + torch.autograd.grad(again, here, total, retain_graph=True)[0]
            return total

        if z.requires_grad:
            z.register_hook(solve)
        return self.head(z)


def _mlp(function):
    return Call(lambda m, x: m.b(function.apply(m.a(x))), a=nn.Linear(3, 5), b=nn.Linear(5, 2))


@case(normal(3), fallback_ok=True)
def detached_tanh():
    return _mlp(DetachedTanh)


@case(normal(3), fallback_ok=True)
def once_differentiable_tanh():
    return _mlp(OnceTanh)


@case(normal(3), fallback_ok=True)
def numpy_tanh():
    return _mlp(NumpyTanh)


@case(normal(3), fallback_ok=True)
def detached_linear():
    return Call(
        lambda m, x: m.b(DetachedLinear.apply(m.a(x).tanh(), m.w).tanh()),
        a=nn.Linear(3, 5), w=weight(4, 5), b=nn.Linear(4, 2),
    )  # fmt: skip


@case(normal(3), fallback_ok=True)
def detached_linear_of_little_weight():
    return Call(
        lambda m, x: m.b(m.a(x).tanh()) + 1e-5 * DetachedLinear.apply(x, m.w),
        a=nn.Linear(3, 5), w=weight(2, 3), b=nn.Linear(5, 2),
    )  # fmt: skip


@case(normal(3), fallback_ok=True)
def adjoint_solver():
    return Call(lambda m, x: m.b(AdjointEuler.apply(m.a(x), m.w)), a=nn.Linear(3, 4), w=weight(4, 4), b=nn.Linear(4, 2))


@case(normal(3), fallback_ok=True)
def recomputed_in_the_backward_pass():
    return Call(
        lambda m, x: m.b(Recomputed.apply(m.inner, m.a(x), *m.inner.parameters())),
        a=nn.Linear(3, 4), inner=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), b=nn.Linear(4, 2),
    )  # fmt: skip


@case(normal(3), fallback_ok=True)
def equilibrium_by_hook():
    return Equilibrium()
