"""The Gauss-Newton matrix ``Jᵀ H J`` of a loss, which is the Fisher matrix for the cross entropy."""

import torch
from torch import nn

from gramscope.base.nested import ModelInput
from gramscope.capture.network import Outputs
from gramscope.hierarchy.losses import Targets, loss_function
from gramscope.kernels.jacobian import linearize
from gramscope.linalg import LinearOperator, eigenvalues_top
from gramscope.measures.loss_curvature import HessianOperator, Sharpness

__all__ = ["gauss_newton", "gauss_newton_sharpness"]


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
    pairs = eigenvalues_top(gauss_newton(model, x, y, loss=loss, outputs=outputs), 1, max_products=steps, seed=seed)
    return Sharpness(float(pairs.values[0]), float(pairs.residuals[0]), pairs.products)
