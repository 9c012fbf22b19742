"""Higher derivatives of a network's outputs along directions, each with a witness; the direction of a step."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite, shape_or_type
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.backward_graph import is_out_of_memory
from gramscope.capture.network import loss_gradient
from gramscope.kernels.expansion import INFINITE, Expansion, Parameters, Tangent

R = TypeVar("R")
# How far two exact ways to one number may differ, relative to the sum of its terms' sizes. Models in float64 may round
# to float32 inside (some norms of transformers do); faults show at order one.
Limits = Mapping[torch.dtype, float]
LIMITS: Limits = {torch.float64: 1e-5, torch.float32: 1e-3}
# A step of this size, relative to the parameters, balances rounding against curvature in a central difference; how far
# the difference may be off then.
DIFFERENCE = {torch.float64: 1e-5, torch.float32: 5e-3}
DIFFERENCE_LIMIT: Limits = {torch.float64: 1e-4, torch.float32: 5e-2}
ORDERS = {2: "second", 3: "third"}
WRONG_BACKWARD = (
    "every operation of the model must have a {name} derivative, but one of them, of torch or of a custom "
    "autograd.Function, has one that is not the derivative of its first. Write it in simpler operations, or its "
    "backward pass in differentiable operations of its saved inputs and outputs; what else it saves counts as constant."
)
DISAGREEING = (
    "{name} derivatives must be the same by backward and by forward mode, but they differ, and rounding hides which is "
    "right: an operation of the model has a wrong higher derivative in torch. Pass precision='float64'."
)


def checked_tangent(at: Expansion, direction: Float[Tensor, " p"], check: bool = True) -> Tangent:
    """The tangent along a direction; with ``check`` its second derivative there has a witness, unless it is proven."""
    tangent = at.tangent(direction)
    if check and not at.proven:
        derivative(tangent, direction)
    return tangent


def derivative(tangent: Tangent, direction: Float[Tensor, " p"], check: bool = True) -> Float[Tensor, "n C"]:
    """The derivative of the outputs along the direction of a tangent (both, of a tangent's tangent) and one more.

    By forward mode applied two or three times, with backward mode as its witness: torch's formulas for higher
    derivatives are not all right, and they do not err alike in both modes. Where they disagree (torch takes the
    factors of ``linalg.solve`` and ``det`` for constants in nested forward mode), and for custom functions that have no
    forward derivative, a difference of lower derivatives decides: backward mode must agree with it, and forward mode
    must not. All else is refused.
    """
    directions = (*tangent.path, direction)
    name = ORDERS[len(directions)]
    forward = by_forward_mode(tangent, directions)
    if forward is not None:
        check_finite(forward, f"{name} derivatives of the outputs", INFINITE)
        if not check or _agrees(forward, (tangent.T @ _weights(forward)) * direction, LIMITS, tangent):
            return forward
    backward = (tangent @ direction).reshape(tangent.rows.shape)
    if not check:
        return backward
    witness = _difference(tangent, directions, _weights(backward))
    if not _agrees(backward, witness, DIFFERENCE_LIMIT, tangent):
        raise UnsupportedError(WRONG_BACKWARD.format(name=name))
    if forward is not None and _agrees(forward, witness, DIFFERENCE_LIMIT, tangent):
        raise UnsupportedError(DISAGREEING.format(name=name))
    return backward


def by_forward_mode(expansion: Expansion, directions: Sequence[Tensor]) -> Float[Tensor, "n C"] | None:
    """The derivative of the outputs along all directions; None where forward mode cannot run."""
    return in_forward_mode(expansion, lambda: derivative_along(expansion, expansion.run, directions))


def derivative_along(
    expansion: Expansion, run: Callable[[Parameters], Tensor], directions: Sequence[Tensor]
) -> Float[Tensor, "n C"]:
    """The same of what ``run`` makes of the parameters; to be called within ``in_forward_mode``."""

    def along(function: Callable[..., Tensor], tangents: Parameters) -> Callable[..., Tensor]:
        return lambda *parameters: torch.func.jvp(function, parameters, tangents)[1]

    function: Callable[..., Tensor] = lambda *parameters: run(parameters)  # noqa: E731
    for direction in directions:
        function = along(function, expansion.split(direction))
    return function(*expansion.point).detach().to(expansion.dtype)


def in_forward_mode(expansion: Expansion, work: Callable[[], R]) -> R | None:
    """What ``work`` gives; None where forward mode cannot run."""
    try:
        with expansion.context(), warnings.catch_warnings():
            # torch compiles its forward derivatives at their first use, and warns of its own compiler.
            warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
            return work()
    except (RuntimeError, NotImplementedError, UnsupportedError) as error:
        if is_out_of_memory(error):
            raise
        return None


def _weights(answer: Float[Tensor, "n C"]) -> Float[Tensor, " rows"]:
    """A vector over the outputs in which none cancels another."""
    return torch.cos(1.0 + torch.arange(answer.numel(), device=answer.device)).to(answer.dtype)


def _agrees(answer: Float[Tensor, "n C"], terms: Float[Tensor, " p"], limits: Limits, tangent: Tangent) -> bool:
    """Is the weighted sum of the answer that of the ``terms``, to the limit of its dtype?"""
    own = _weights(answer) * answer.reshape(-1)
    error, size = abs(float(terms.sum() - own.sum())), float(terms.abs().sum() + own.abs().sum())
    # Where derivatives cancel, what is left is rounding of numbers of these sizes.
    f, slope = float(tangent.f.detach().abs().max()), float(tangent.g.detach().abs().max())
    rounding = torch.finfo(answer.dtype).eps * (f + slope + (slope**2 / f if f else 0.0)) * answer.numel()
    return error <= max(limits.get(answer.dtype, 1e-3) * size, 1e3 * rounding)


def _difference(
    expansion: Expansion, directions: Sequence[Tensor], weights: Float[Tensor, " rows"]
) -> Float[Tensor, " p"]:
    """Terms of the change of the lower derivative over a short step along the last direction, for its length.

    A custom function may save numbers that depend on its inputs as if they were constants: its first derivative is
    right, its second one is not.
    """
    *firsts, before, last = directions
    if not bool(last.any()):
        return torch.zeros_like(last)
    size = float(torch.cat([p.reshape(-1).to(last) for p in expansion.point]).norm()) or 1.0
    short = DIFFERENCE[expansion.dtype] * size / float(last.norm())
    sides = []
    for step in (short * last, -short * last):
        there = expansion.at(step, keep_sides=True)
        for direction in firsts:
            there = there.tangent(direction)
        sides.append(there.T @ weights)
    return (sides[0] - sides[1]) * before / (2 * short)


def step_direction(
    at: Expansion, residual: Tensor | Callable[[Tensor], Tensor], name: str = "residual"
) -> Float[Tensor, " p"]:
    """``v = λ Jᵀ ε``, with ``ε = ∂loss/∂f`` or a loss of the outputs: a step of size η moves θ to ``θ - η v``."""
    f = at.f.detach()
    if not isinstance(residual, Tensor) and callable(residual):
        residual = loss_gradient(residual, f, name)[1]
    if not isinstance(residual, Tensor) or residual.shape not in (f.shape, (f.numel(),)):
        raise InputError(
            f"{name} must have the shape {tuple(f.shape)} of the outputs, or be flattened to ({f.numel()},), got "
            f"{shape_or_type(residual)}. It is a tensor ∂loss/∂f, e.g. (f - y) for half the squared error; a residual "
            "may be a function f -> loss as well."
        )
    check_finite(residual, name, "Check the loss and the targets.")
    return at.step(residual.detach().reshape(-1).to(dtype=at.dtype, device=at.device))
