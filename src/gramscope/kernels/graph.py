"""Products with the Jacobian and with its derivative along a direction, as traversals of graphs that are built once.

Along a direction v the Hessian of every output becomes one matrix ``J̇ = D_v J`` (U, P), the Jacobian of ``θ ↦ J v``.
A :class:`Tangent` holds the graph of ``J v``; products with J̇ and J̇ᵀ are traversals of it. No Hessian is formed.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.backward_graph import check_differentiable
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.network import loss_gradient
from gramscope.kernels.expansion import Expansion

# How far two exact ways to one number may differ, relative to the sum of its terms' sizes. Models in float64 may round
# to float32 inside (some norms of transformers do); faults show at order one.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}
# A step of this size, relative to the parameters, balances rounding against curvature in a central difference; how far
# the difference may be off then.
DIFFERENCE = {torch.float64: 1e-5, torch.float32: 5e-3}
DIFFERENCE_LIMIT = {torch.float64: 1e-4, torch.float32: 5e-2}
INFINITE = (
    "An operation of the model has an infinite one where it stands, as a root, a norm or a power below 2 has at zero; "
    "behind a ReLU or a clamp every unit that is off stands at zero. Keep it away from zero, or take a power of 2 or "
    "more."
)


class Graph:
    """Products with J and Jᵀ, each a traversal of one graph: ``Jᵀc`` is kept as a linear function of c."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.leaves = expansion.fresh_leaves()
        with expansion.context():
            self.f: Tensor = expansion.run(self.leaves)
            check_differentiable(self.f)
            if not self.f.requires_grad:
                raise InputError(
                    "the model's output must depend on a measured parameter, but it carries no gradient. Is its "
                    "forward pass under torch.no_grad() or detached, or do its parameters not enter?"
                )
        self.linear_map = LinearMap([self.f], self.leaves)

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        with self.expansion.context(forward=False):
            return self.expansion.function.vjp(self.linear_map, vectors)

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        with self.expansion.context(forward=False):
            return self.expansion.function.jvp(self.linear_map, vectors)

    def directions(self, rates: Float[Tensor, " p"] | None) -> Float[Tensor, "p u"]:
        """``λ Jᵀ``: the step that each output alone would make."""
        unit = torch.eye(self.expansion.rows.size, dtype=self.expansion.dtype, device=self.expansion.device)
        return weighted(self.vjp(unit), rates)

    def tangent(self, direction: Float[Tensor, " p"]) -> "Tangent":
        return Tangent(self, direction)


class Tangent(Graph):
    """``J̇ = D_v J`` for one direction v: products with it and its transpose, and ``g = J v`` itself.

    The tangent of a tangent is ``D_u D_v J``: third derivatives of the outputs.
    """

    def __init__(self, graph: Graph, direction: Float[Tensor, " p"]) -> None:
        self.expansion = expansion = graph.expansion
        self.leaves, self.f = graph.leaves, graph.f.detach()
        self.g: Tensor
        with expansion.context(forward=False):
            tangents = [part[0] for part in expansion.function.split(direction[:, None])]
            (self.g,) = expansion.function.at(self.leaves, lambda: graph.linear_map.along(tangents))
        self.linear_map: LinearMap = LinearMap([self.g], self.leaves)

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``J̇ᵀ w`` for each column w."""
        return _finite(super().vjp(vectors))

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J̇ a``, the mixed second derivative along v and a, for each column a."""
        return _finite(super().jvp(vectors))


def _finite(found: Tensor) -> Tensor:
    check_finite(found, "second derivatives of the outputs", INFINITE)
    return found


def weighted(vectors: Float[Tensor, "p k"], rates: Float[Tensor, " p"] | None) -> Float[Tensor, "p k"]:
    """``λ v`` for each column v."""
    return vectors if rates is None else rates[:, None] * vectors


def checked_tangent(graph: Graph, direction: Float[Tensor, " p"], check: bool = True) -> Tangent:
    """The tangent along a direction; with ``check`` its second derivative along the same direction has a witness."""
    tangent = graph.tangent(direction)
    if check:
        second_derivative(graph, direction, tangent=tangent)
    return tangent


def second_derivative(
    graph: Graph, direction: Float[Tensor, " p"], check: bool = True, tangent: Tangent | None = None
) -> Float[Tensor, "n C"]:
    """``d²f(θ + s·direction)/ds²`` by forward mode applied twice, with backward mode as its witness.

    Torch's formulas for higher derivatives are not all right (see ``written_out``), and they do not err alike in both
    modes. Where they disagree there is no telling which is right, so the answer is refused. Custom functions that have
    no forward derivative go through the graph, with a difference of gradients as the witness.
    """
    expansion = graph.expansion
    answer = twice_forward(expansion, direction)
    if answer is not None:
        check_finite(answer, "second derivatives of the outputs", INFINITE)
        if check:
            _check_agreement(answer, tangent or graph.tangent(direction), direction)
        return answer
    answer = (tangent or graph.tangent(direction)).jvp(direction[:, None]).reshape(expansion.rows.shape)
    if check:
        _check_by_difference(answer, expansion, direction)
    return answer


def twice_forward(expansion: Expansion, direction: Float[Tensor, " p"]) -> Float[Tensor, "n C"] | None:
    tangents = tuple(part[0] for part in expansion.function.split(direction[:, None]))

    def slope(*parameters: Tensor) -> Tensor:
        return torch.func.jvp(lambda *p: expansion.run(p), parameters, tangents)[1]

    try:
        with expansion.context():
            return torch.func.jvp(slope, expansion.point, tangents)[1].to(expansion.dtype)
    except (RuntimeError, NotImplementedError, UnsupportedError):
        return None


def _check_agreement(answer: Tensor, tangent: Tangent, direction: Float[Tensor, " p"]) -> None:
    """Raise unless ``w·(J̇ v)`` by forward mode and ``(J̇ᵀ w)·v`` by backward mode are the same to rounding."""
    w = torch.cos(1.0 + torch.arange(answer.numel(), device=answer.device)).to(answer.dtype)
    terms = tangent.vjp(w[:, None])[:, 0] * direction
    error = abs(float(terms.sum() - (w * answer.reshape(-1)).sum()))
    size = float(terms.abs().sum() + (w * answer.reshape(-1)).abs().sum())
    # Where second derivatives cancel, what is left is rounding of numbers of these sizes.
    f, slope = float(tangent.f.abs().max()), float(tangent.g.detach().abs().max())
    rounding = torch.finfo(answer.dtype).eps * (f + slope + (slope**2 / f if f else 0.0)) * answer.numel()
    limit = LIMITS.get(answer.dtype, 1e-3)
    if not error <= max(limit * size, 1e3 * rounding):
        raise UnsupportedError(
            "second derivatives must be the same by backward and by forward mode, but they differ by "
            f"{error / size:.1e} of their size: an operation of the model has a wrong higher derivative in torch. "
            "Write it in simpler operations; a matrix solve and fused operations are candidates."
        )


def _check_by_difference(answer: Float[Tensor, "n C"], expansion: Expansion, direction: Float[Tensor, " p"]) -> None:
    """Raise unless ``w·(J̇ v)`` is the change of ``(Jᵀ w)·v`` along a short step: gradients need one derivative only.

    A custom function may save numbers that depend on its inputs as if they were constants: its first derivative is
    right, its second one is not.
    """
    if not bool(direction.any()):
        return
    w = torch.cos(1.0 + torch.arange(answer.numel(), device=answer.device)).to(answer.dtype)[:, None]
    size = float(torch.cat([p.reshape(-1).to(direction) for p in expansion.point]).norm()) or 1.0
    short = DIFFERENCE[expansion.dtype] * size / float(direction.norm()) * direction
    ahead, behind = (Graph(expansion.at(step, keep_sides=True)).vjp(w)[:, 0] for step in (short, -short))
    terms = (ahead - behind) * direction / (2 * float(short.norm() / direction.norm()))
    error = abs(float(terms.sum() - (w[:, 0] * answer.reshape(-1)).sum()))
    if error > DIFFERENCE_LIMIT[expansion.dtype] * float(terms.abs().sum()):
        raise UnsupportedError(
            "every operation of the model must have a second derivative, but that of a custom autograd.Function is not "
            "the derivative of its first. Write its backward pass in differentiable operations of its saved inputs and "
            "outputs; what else it saves counts as constant."
        )


def step_direction(
    graph: Graph, residual: Tensor | Callable[[Tensor], Tensor], rates: Float[Tensor, " p"] | None
) -> Float[Tensor, " p"]:
    """``v = λ Jᵀ ε``: a step of size η moves θ to ``θ - η v``."""
    epsilon = residual_of(graph.expansion, residual)
    gradient = graph.vjp(epsilon.reshape(-1, 1))[:, 0]
    return gradient if rates is None else rates * gradient


def residual_of(expansion: Expansion, residual: Tensor | Callable[[Tensor], Tensor]) -> Float[Tensor, "n C"]:
    """``ε = ∂loss/∂f`` (n, C), from the tensor itself or from a loss of the outputs."""
    f = expansion.f
    if isinstance(residual, Tensor):
        if residual.shape != f.shape and not (residual.shape == f.shape[:1] and f.shape[1] == 1):
            raise InputError(
                f"residual must have the shape {tuple(f.shape)} of the outputs, got {tuple(residual.shape)}. It is "
                "∂loss/∂f, e.g. (f - y) for half the squared error; a function f -> loss does as well."
            )
        epsilon = residual.detach().clone().reshape(f.shape)
    elif not callable(residual):
        raise InputError(
            f"residual must be a tensor ∂loss/∂f or a function f -> loss, got {type(residual).__name__}. Convert an "
            "array with torch.as_tensor."
        )
    else:
        epsilon = loss_gradient(residual, f, "residual")[1]
    check_finite(epsilon, "residual", "Check the loss and the targets.")
    return epsilon.to(dtype=expansion.dtype, device=expansion.device)
