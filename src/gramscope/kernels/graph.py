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
from gramscope.capture.batched import batched_gradients_or_zeros
from gramscope.kernels.expansion import Expansion, Parameters

# How far two exact ways to one number may differ, relative to the sum of its terms' sizes. Models in float64 may round
# to float32 inside (some norms of transformers do); faults show at order one.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}


class Graph:
    """Products with J and Jᵀ, each a traversal of one graph: ``Jᵀc`` is kept as a linear function of c."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.leaves = expansion.fresh_leaves()
        with expansion.surroundings():
            self.f: Tensor = expansion.run(self.leaves)
            if not self.f.requires_grad:
                raise InputError(
                    "the model's output must depend on a measured parameter, but it carries no gradient. Is its "
                    "forward pass under torch.no_grad() or detached, or do its parameters not enter?"
                )
        self._lazy: LinearInCotangent | None = None

    @property
    def _linear(self) -> "LinearInCotangent":
        if self._lazy is None:
            with self.expansion.surroundings():
                self._lazy = LinearInCotangent(self.f, self.leaves)
        return self._lazy

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        return _products(self.expansion, self.f, self.leaves, vectors)

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        return self._linear.products(self.expansion, vectors)

    def tangent(self, direction: Float[Tensor, " p"]) -> "Tangent":
        return Tangent(self, direction)


class Tangent:
    """``J̇ = D_v J`` for one direction v: products with it and its transpose, and ``J v`` itself."""

    def __init__(self, graph: Graph, direction: Float[Tensor, " p"]) -> None:
        self.expansion = expansion = graph.expansion
        self.leaves, self.f = graph.leaves, graph.f.detach()
        with expansion.surroundings():
            self.g: Tensor = graph._linear.along([part[0] for part in expansion.split(direction[:, None])])
        self._linear: LinearInCotangent | None = None

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``J̇ᵀ w`` for each column w."""
        if not self.g.requires_grad:
            return vectors.new_zeros(self.expansion.cols.size, vectors.shape[1])
        return _products(self.expansion, self.g, self.leaves, vectors)

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J̇ a``, the mixed second derivative along v and a, for each column a."""
        if not self.g.requires_grad:
            return vectors.new_zeros(self.expansion.rows.size, vectors.shape[1])
        if self._linear is None:
            with self.expansion.surroundings():
                self._linear = LinearInCotangent(self.g, self.leaves)
        return self._linear.products(self.expansion, vectors)


class LinearInCotangent:
    """``c ↦ (∂f/∂θ)ᵀ c`` with its graph; a backward pass through it in c gives ``(∂f/∂θ) v``."""

    def __init__(self, f: Tensor, leaves: Parameters) -> None:
        self.f, self.leaves, self._checked = f, leaves, False
        self.placeholder = torch.zeros_like(f, requires_grad=True)
        self.gradients = torch.autograd.grad(f, leaves, self.placeholder, create_graph=True, allow_unused=True)

    def along(self, tangents: list[Tensor]) -> Tensor:
        """``(∂f/∂θ) v`` as a differentiable function of θ."""
        used = [(g, t) for g, t in zip(self.gradients, tangents, strict=True) if g is not None and g.requires_grad]
        if not used:
            return torch.zeros_like(self.placeholder).detach()
        (found,) = torch.autograd.grad(
            [g for g, _ in used], (self.placeholder,), [t for _, t in used], create_graph=True, allow_unused=True
        )
        if found is None:
            raise _broken_link()
        if not self._checked:
            self._check_adjoint(found.detach(), tangents)
        return found

    def _check_adjoint(self, found: Tensor, tangents: list[Tensor]) -> None:
        """``w·(J v) = (Jᵀw)·v`` once, the right side without the graph of c: a link that broke on the way shows."""
        self._checked = True
        w = torch.cos(1.0 + torch.arange(found.numel(), device=found.device)).to(found.dtype).reshape(found.shape)
        gradients = torch.autograd.grad(self.f, self.leaves, w, retain_graph=True, allow_unused=True)
        terms = [(g * t).sum() for g, t in zip(gradients, tangents, strict=True) if g is not None]
        sizes = [(g * t).abs().sum() for g, t in zip(gradients, tangents, strict=True) if g is not None]
        limit = LIMITS.get(found.dtype, 1e-1)
        if not terms or not abs(float(sum(terms) - (w * found).sum())) <= limit * float(sum(sizes)):
            raise _broken_link()

    def products(self, expansion: Expansion, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        count = vectors.shape[1]
        pairs = zip(self.gradients, expansion.split(vectors), strict=True)
        used = [(g, t) for g, t in pairs if g is not None and g.requires_grad]
        if count == 0 or not used:
            return vectors.new_zeros(expansion.rows.size, count)
        with expansion.surroundings():
            (found,) = batched_gradients_or_zeros([g for g, _ in used], (self.placeholder,), [t for _, t in used])
            if not self._checked:
                self._check_adjoint(found[0], [t[0] for t in expansion.split(vectors)])
        return found.reshape(count, -1).T.to(expansion.dtype)


def _broken_link() -> UnsupportedError:
    return UnsupportedError(
        "every operation of the model must have a second derivative, but the backward pass of one (an "
        "autograd.Function marked @once_differentiable, or one that leaves autograd) cannot be differentiated. Write "
        "it with differentiable operations; nothing is approximated here."
    )


def _products(
    expansion: Expansion, f: Tensor, leaves: Parameters, vectors: Float[Tensor, "rows k"]
) -> Float[Tensor, "p k"]:
    if vectors.shape[1] == 0:
        return vectors.new_zeros(expansion.cols.size, 0)
    cotangents = vectors.T.reshape(-1, *f.shape).to(f.dtype)
    with expansion.surroundings():
        return expansion.join(batched_gradients_or_zeros([f], leaves, [cotangents]))


def second_derivative(
    expansion: Expansion, graph: Graph, first: Float[Tensor, " p"], second: Float[Tensor, " p"], check: bool = True
) -> Float[Tensor, "n C"]:
    """``∂²f(θ + s·first + t·second)/∂s∂t`` by forward mode applied twice, with backward mode as its witness.

    Torch's formulas for higher derivatives are not all right (see ``written_out``), and they do not err alike in both
    modes. Where they disagree there is no telling which is right, so the answer is refused. Operations that have no
    forward derivative go through the graph, without a witness.
    """
    answer = twice_forward(expansion, first, second)
    if answer is None:
        answer = graph.tangent(first).jvp(second[:, None]).reshape(expansion.rows.shape)
    elif check:
        _check_agreement(answer, graph.tangent(first), second)
    check_finite(answer, "second derivatives of the outputs", "A norm or a square root at zero, or overflow?")
    return answer


def twice_forward(
    expansion: Expansion, first: Float[Tensor, " p"], second: Float[Tensor, " p"]
) -> Float[Tensor, "n C"] | None:
    u, v = (tuple(part[0] for part in expansion.split(w[:, None])) for w in (first, second))

    def slope(*parameters: Tensor) -> Tensor:
        return torch.func.jvp(lambda *p: expansion.run(p), parameters, u)[1]

    try:
        with expansion.surroundings():
            return torch.func.jvp(slope, expansion.point, v)[1].to(expansion.dtype)
    except (RuntimeError, NotImplementedError, UnsupportedError):
        return None


def _check_agreement(answer: Tensor, tangent: Tangent, second: Float[Tensor, " p"]) -> None:
    """Raise unless ``w·(J̇ a)`` by forward mode and ``(J̇ᵀ w)·a`` by backward mode are the same to rounding."""
    w = torch.cos(1.0 + torch.arange(answer.numel(), device=answer.device)).to(answer.dtype)
    terms = tangent.vjp(w[:, None])[:, 0] * second
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
        values = f.detach().clone().requires_grad_()
        with torch.inference_mode(False), torch.enable_grad():
            loss = residual(values)
            if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
                raise InputError(
                    "a loss given as residual must return one differentiable number for outputs (n, C), got "
                    f"{type(loss).__name__}" + (f" of shape {tuple(loss.shape)}." if isinstance(loss, Tensor) else ".")
                )
            (epsilon,) = torch.autograd.grad(loss, values)
    check_finite(epsilon, "residual", "Check the loss and the targets.")
    return epsilon.to(dtype=expansion.dtype, device=expansion.device)
