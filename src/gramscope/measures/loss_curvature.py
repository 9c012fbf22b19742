"""Curvature of a loss: its Hessian and its Gauss-Newton matrix as operators, and the greatest eigenvalue of each."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_tensor
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.results import Result
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.network import Outputs
from gramscope.capture.side_effects import gradients_returned
from gramscope.hierarchy.losses import Targets, loss_function
from gramscope.kernels.expansion import naming_operations
from gramscope.kernels.jacobian import linearize
from gramscope.linalg import LinearOperator, eigenvalues_top


class HessianOperator(LinearOperator):
    """``H = ∂²loss/∂θ²`` on the entries of the parameters, one after the other; a product is two backward passes.

    A ReLU counts as autograd has it: its second derivative is zero. Fused attention has none: compute the loss within
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
    """

    def __init__(self, loss: Float[Tensor, ""], parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        if not parameters or not all(isinstance(p, Tensor) and p.requires_grad for p in parameters):
            raise InputError("parameters must be tensors with requires_grad on which the loss depends.")
        if check_tensor(loss, "loss").numel() != 1 or not loss.requires_grad:
            raise InputError(
                f"loss must be one number with a graph to the parameters, got shape {tuple(loss.shape)}. Compute it "
                "with gradients on, and do not detach it."
            )
        with torch.enable_grad(), gradients_returned(parameters):
            gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        self._map, n = LinearMap(gradients, parameters), sum(p.numel() for p in parameters)
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        super().__init__(n, n, dtype=dtype, device=parameters[0].device, symmetric=True)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        if x.shape[1] == 0:
            return x
        parameters = self._map.inputs
        parts = x.T.split([p.numel() for p in parameters], dim=1)
        vectors = [part.reshape(len(part), *p.shape) for part, p in zip(parts, parameters, strict=True)]
        with naming_operations():
            found = self._map.vjp(vectors)
        filled = [
            torch.zeros_like(part) if f is None else f.reshape(len(f), -1) for f, part in zip(found, parts, strict=True)
        ]
        return torch.cat(filled, dim=1).T.to(self.dtype)


@dataclass(frozen=True, repr=False)
class Sharpness(Result):
    """``value``: the greatest Ritz value; an eigenvalue lies within ``error`` of it. ``products``: with the Hessian."""

    value: float
    error: float
    products: int


def sharpness(loss: Float[Tensor, ""], parameters: Iterable[Tensor], *, steps: int = 10, seed: int = 0) -> Sharpness:
    """Greatest eigenvalue ``λ_max`` of the Hessian of ``loss`` in ``parameters``, by at most ``steps`` Lanczos steps.

    The value never exceeds ``λ_max`` (Ritz values are inside the spectrum). Gradient descent with learning rate η is
    stable along its direction where ``λ_max < 2/η``; training often moves to that edge (arXiv:2103.00065).

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
        >>> round(sharpness((w**2 * torch.tensor([3.0, 0.5])).sum(), [w]).value, 6)
        6.0
    """
    return _greatest(HessianOperator(loss, parameters), steps, seed)


def gauss_newton(
    model: nn.Module, x: ModelInput, y: Targets, *, loss: object = "cross_entropy", outputs: Outputs = None
) -> LinearOperator:
    """The generalised Gauss-Newton matrix ``G = Jᵀ H J`` as a symmetric operator on the parameters.

    ``J = ∂f/∂θ`` over all examples and outputs, ``H = ∂²loss/∂f²``. It is the Hessian of the loss without the curvature
    of the network, and positive semi-definite for a convex loss. For the cross entropy it is the Fisher information
    matrix of the softmax, which does not depend on the labels ``y`` (J. Martens, JMLR 21 (2020), sections 8 and 9); for
    ``loss="mse"`` it is ``2/(nC) JᵀJ``, with the eigenvalues of the tangent kernel. ``loss`` is a name or a function
    (outputs, y) -> number, as for ``explain_step``, of the outputs (n, C). No matrix is formed.

    Example:
        >>> import torch, gramscope as gs
        >>> G = gs.measures.gauss_newton(torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1), loss="mse")
        >>> G.dense().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    linear = linearize(model, x, outputs=outputs)
    f = linear.outputs.to(linear.jacobian.dtype).clone().requires_grad_()
    with torch.enable_grad():
        value = loss_function(loss)(f, y)
    return linear.jacobian.T @ HessianOperator(value, [f]) @ linear.jacobian


def gauss_newton_sharpness(
    model: nn.Module,
    x: ModelInput,
    y: Targets,
    *,
    loss: object = "cross_entropy",
    outputs: Outputs = None,
    steps: int = 20,
    seed: int = 0,
) -> Sharpness:
    """Greatest eigenvalue of :func:`gauss_newton`, by at most ``steps`` products; arguments as there.

    Example:
        >>> import torch, gramscope as gs
        >>> x = torch.diag(torch.tensor([3.0, 1.0]))
        >>> model, y = torch.nn.Linear(2, 1, bias=False), torch.zeros(2, 1)
        >>> found = gs.measures.gauss_newton_sharpness(model, x, y, loss="mse")
        >>> round(found.value, 4)
        9.0
    """
    return _greatest(gauss_newton(model, x, y, loss=loss, outputs=outputs), steps, seed)


def _greatest(op: LinearOperator, products: int, seed: int) -> Sharpness:
    pairs = eigenvalues_top(op, 1, max_products=products, seed=seed)
    return Sharpness(float(pairs.values[0]), float(pairs.residuals[0]), pairs.products)
