"""The tangent kernel as an operator: products without the matrix."""

from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.nested import ModelInput
from gramscope.capture.network import Outputs, Precision
from gramscope.kernels.expansion import Rates, flat_metric
from gramscope.kernels.linearized_model import JacobianOperator
from gramscope.linalg import LinearOperator


class NTKOperator(LinearOperator):
    """``K = J D J₂ᵀ``; D a diagonal metric on the parameters (learning rates, a preconditioner), one if None."""

    def __init__(self, left: JacobianOperator, right: JacobianOperator, metric: Float[Tensor, " p"] | None) -> None:
        self.jacobian, self.jacobian2, self.metric = left, right, metric
        super().__init__(left.rows, right.rows, dtype=left.dtype, device=left.device, symmetric=right is left)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self.jacobian.matmat(self._weighted(self.jacobian2.adjoint().matmat(x)))

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return self.jacobian2.matmat(self._weighted(self.jacobian.adjoint().matmat(x)))

    @property
    def slow(self) -> str:
        """Why products with J take one backward pass for each output; empty where they do not."""
        return self.jacobian.slow or self.jacobian2.slow

    def _weighted(self, v: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        return v if self.metric is None else self.metric[:, None] * v


def ntk_operator(
    model: nn.Module,
    x: ModelInput,
    x2: ModelInput = None,
    *,
    outputs: Outputs = None,
    metric: Rates = None,
    frozen: bool = False,
    precision: Precision = None,
) -> NTKOperator:
    """The kernel ``J D Jᵀ`` on vectors over (example, output), flattened; no matrix is formed.

    One product costs one backward pass and one pass of the same size through its own graph. ``metric`` is the diagonal
    D: a number or tensor for each parameter name (others get zero), a function (name, parameter) -> either, one flat
    tensor over all parameters, or one number for all. The Jacobian itself is ``.jacobian``, its transpose
    ``.jacobian.T``. Parameters and dropout masks are those of now: neither later training nor later random numbers
    change the operator.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> K = gs.ntk_operator(model, torch.eye(3))
        >>> K
        NTKOperator(rows=Axes(example=3, output=2), cols=Axes(example=3, output=2), float32, cpu, symmetric)
        >>> (K @ torch.ones(6)).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    left = JacobianOperator(model, x, outputs, frozen, precision)
    right = left if x2 is None else JacobianOperator(model, x2, outputs, frozen, precision)
    diagonal = None if metric is None else flat_metric(metric, left.parameters).to(dtype=left.dtype, device=left.device)
    return NTKOperator(left, right, diagonal)
