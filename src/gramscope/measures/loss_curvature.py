"""Sharpness: the greatest eigenvalue of the Hessian of the loss, from a few products with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.linalg import LinearOperator, eigenvalues_top

__all__ = ["HessianOperator", "Sharpness", "sharpness"]


class HessianOperator(LinearOperator):
    """``H = ∂²loss/∂θ²`` on the entries of the parameters, one after the other; a product is two backward passes.

    A ReLU counts as autograd has it: its second derivative is zero.
    """

    def __init__(self, loss: Float[Tensor, ""], parameters: Sequence[Tensor]) -> None:
        if not parameters or not all(p.requires_grad for p in parameters):
            raise InputError("parameters must be tensors with requires_grad on which the loss depends.")
        with torch.enable_grad():
            self._gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        self._parameters = tuple(parameters)
        self._sizes = [p.numel() for p in parameters]
        dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        super().__init__(
            sum(self._sizes), sum(self._sizes), dtype=dtype, device=parameters[0].device, symmetric=True
        )  # fmt: skip

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        product = torch.empty_like(x)
        for k in range(x.shape[1]):
            product[:, k] = self._product(x[:, k])
        return product

    def _product(self, vector: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        curved = [
            (gradient, part.view_as(gradient).to(gradient.dtype))
            for gradient, part in zip(self._gradients, vector.split(self._sizes), strict=True)
            if gradient.requires_grad
        ]
        if not curved:  # a loss that is linear in the parameters
            return torch.zeros_like(vector)
        gradients, parts = zip(*curved, strict=True)
        found = torch.autograd.grad(gradients, self._parameters, parts, retain_graph=True, materialize_grads=True)
        return torch.cat([part.reshape(-1).to(self.dtype) for part in found])


@dataclass(frozen=True, repr=False)
class Sharpness(Result):
    """``value``: the greatest Ritz value; an eigenvalue lies within ``error`` of it. ``products``: with the Hessian."""

    value: float
    error: float
    products: int


def sharpness(loss: Float[Tensor, ""], parameters: Sequence[Tensor], *, steps: int = 10, seed: int = 0) -> Sharpness:
    """Greatest eigenvalue ``λ_max`` of the Hessian of ``loss`` in ``parameters``, by at most ``steps`` Lanczos steps.

    The value never exceeds ``λ_max`` (Ritz values lie inside the spectrum). Gradient descent with learning rate η is
    stable along its direction where ``λ_max < 2/η``; training often moves to that edge (arXiv:2103.00065).

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
        >>> round(sharpness((w**2 * torch.tensor([3.0, 0.5])).sum(), [w]).value, 6)
        6.0
    """
    pairs = eigenvalues_top(HessianOperator(loss, parameters), 1, max_products=steps, seed=seed)
    return Sharpness(float(pairs.values[0]), float(pairs.residuals[0]), pairs.products)
