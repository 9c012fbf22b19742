"""The network linearised at its parameters: outputs for other parameters, to first order."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.capture.network import Outputs, Precision
from gramscope.kernels.linearization import Linearization
from gramscope.kernels.ntk_products import JacobianOperator


class LinearizedModel:
    """``f_lin(θ) = f(θ₀) + J (θ − θ₀)`` on fixed examples; θ₀ are copies of the parameters of when it was made.

    ``outputs`` is f(θ₀), (n, C). ``jacobian`` is J as an operator, from the parameters to (example, output);
    ``parameters`` is θ₀ by name.
    """

    def __init__(self, linearization: Linearization) -> None:
        self._linearization = linearization
        self.jacobian = JacobianOperator(linearization)

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        return self._linearization.f.detach()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._linearization.parameters.items()}

    def __call__(self, parameters: nn.Module | Mapping[str, Tensor]) -> Float[Tensor, "n C"]:
        """The outputs at other parameters: a module's, or tensors by name (those not named stay at θ₀)."""
        given = dict(parameters.named_parameters()) if isinstance(parameters, nn.Module) else dict(parameters)
        if isinstance(parameters, nn.Module):
            given = {name: value for name, value in given.items() if name in self._linearization.parameters}
        return self.outputs + self.change({name: value - self._start(name, value) for name, value in given.items()})

    def change(self, step: Mapping[str, Tensor] | Float[Tensor, " p"]) -> Float[Tensor, "n C"]:
        """``J Δθ`` for a step in the parameters: tensors by name (others do not move), or one flat vector."""
        flat = step if isinstance(step, Tensor) else self._linearization.flat(step)
        with torch.no_grad():
            return self.jacobian.matvec(flat.detach().to(self.jacobian.dtype)).reshape(self.outputs.shape)

    def _start(self, name: str, value: Tensor) -> Tensor:
        start = self._linearization.parameters.get(name)
        if start is None or start.shape != value.shape:
            known = "no such parameter" if start is None else f"shape {tuple(start.shape)} there"
            raise InputError(
                f"parameters must be those of the linearised model, but {name!r} of shape {tuple(value.shape)} has "
                f"{known}. It has {', '.join(list(self._linearization.parameters)[:6])} ..."
            )
        return start.detach()

    def __repr__(self) -> str:
        n, outputs = self.outputs.shape
        return f"LinearizedModel({n} examples, {outputs} outputs, {self.jacobian.cols.size:,} parameters)"


def linearize(
    model: nn.Module, x: ModelInput, *, outputs: Outputs = None, frozen: bool = False, precision: Precision = None
) -> LinearizedModel:
    """The network linearised at its parameters, on the examples ``x``.

    ``f_lin(θ) = f(θ₀) + J (θ − θ₀)``, the first-order Taylor expansion whose training is kernel gradient descent with
    the tangent kernel (Lee et al. 2019, arXiv:1902.06720, eq. 5). J is never formed: a call is one product. Later
    training of ``model`` does not change it, so ``f_lin(model)`` after some steps shows how far training was linear.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> flat = gs.linearize(model, torch.eye(2))
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> flat(model).flatten().tolist()             # a linear model is its own linearisation
        [1.0, 1.0]
    """
    return LinearizedModel(Linearization(model, x, outputs, frozen, precision))
