"""The Jacobian of a network as an operator, the tangent kernel as a product of two, and the linearised network.

Products with J and Jᵀ are one graph traversal each and do not run the network again (``gramscope.capture.linear_map``).
Convolutions on a GPU are the exception: there forward mode is faster, and ``J v`` runs the network once more.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.capture.network import Outputs, Precision, named_parameters, unwrap
from gramscope.kernels.derivatives import derivative_along, in_forward_mode
from gramscope.kernels.expansion import Expansion
from gramscope.kernels.learning_rates import Rates, flat_metric
from gramscope.linalg import Composition, Diagonal


class JacobianOperator(Expansion):
    """``J = ∂f/∂θ``, from parameters to (example, output), at copies of the parameters: later training changes nothing.

    >>> import torch, gramscope as gs
    >>> J = gs.ntk_operator(torch.nn.Linear(3, 2), torch.randn(5, 3)).jacobian
    >>> J.shape, (J.T @ torch.ones(10)).shape
    ((10, 8), torch.Size([8]))
    """

    def __init__(
        self, model: nn.Module, x: ModelInput, outputs: Outputs = None, frozen: bool = False,
        precision: Precision = None,
    ) -> None:  # fmt: skip
        super().__init__(model, x, outputs=outputs, frozen=frozen, precision=precision)
        # On an H200, J v of a ResNet-18 took 0.154 s twice backward and about 0.04 s forward.
        convolutional = any(isinstance(module, nn.modules.conv._ConvNd) for module in self.function.model.modules())
        self._forward_mode = convolutional and self.f.is_cuda

    @property
    def slow(self) -> str:
        """Why ``J v`` takes one backward pass for each output, as far as is known; empty where it does not."""
        return self.linear_map.slow

    def _matmat(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        if self._forward_mode and x.shape[1]:
            found = self._forward(x)
            self._forward_mode = found is not None and self._forward_is_right
            if found is not None and self._forward_mode:
                return found
        return super()._matmat(x)

    def _forward(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"] | None:
        """The same by forward mode; None where an operation has no forward derivative."""
        columns = in_forward_mode(self, lambda: [derivative_along(self, self.call, [v]) for v in vectors.T])
        return None if columns is None else torch.stack(columns).flatten(1).T

    @cached_property
    def _forward_is_right(self) -> bool:
        def products(tangents: Sequence[Tensor | None]) -> list[Tensor]:
            found = self._forward(self._joined(tangents, 1))
            assert found is not None
            return [found.T.reshape(1, *self.f.shape)]

        return self.on_graph(lambda: self.linear_map.check(products))


class NTKOperator(Composition):
    """``K = J D J₂ᵀ``; D a diagonal metric on the parameters (learning rates, a preconditioner), one if None."""

    def __init__(self, left: JacobianOperator, right: JacobianOperator, metric: Float[Tensor, " p"] | None) -> None:
        self.jacobian, self.jacobian2, self.metric = left, right, metric
        super().__init__(left, *([] if metric is None else [Diagonal(metric, left.cols)]), right.T)

    @property
    def slow(self) -> str:
        """Why products with J take one backward pass for each output; empty where they do not."""
        return self.jacobian.slow or self.jacobian2.slow


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


class LinearizedModel:
    """``f_lin(θ) = f(θ₀) + J (θ − θ₀)`` on fixed examples; θ₀ are copies of the parameters of when it was made.

    ``outputs`` is f(θ₀), (n, C). ``jacobian`` is J as an operator, from the parameters to (example, output);
    ``parameters`` is θ₀ by name.
    """

    def __init__(self, jacobian: JacobianOperator) -> None:
        self.jacobian = jacobian

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        return self.jacobian.f.detach()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.jacobian.parameters.items()}

    def __call__(self, parameters: nn.Module | Mapping[str, Tensor]) -> Float[Tensor, "n C"]:
        """The outputs at other parameters: a module's, or tensors by name (those not named stay at θ₀)."""
        if isinstance(parameters, nn.Module):
            own = named_parameters(unwrap(parameters))
            parameters = {name: value for name, value in own.items() if name in self.jacobian.parameters}
        if not isinstance(parameters, Mapping):
            raise InputError(
                "a linearised model is called with a module, or with tensors by parameter name, got "
                f"{type(parameters).__name__}. Its examples are those it was made with: gs.linearize(model, other_x)."
            )
        real = {name: real_view(value) for name, value in parameters.items()}
        return self.outputs + self.change({name: value - self._start(name, value) for name, value in real.items()})

    def change(self, step: Mapping[str, Tensor] | Float[Tensor, " p"]) -> Float[Tensor, "n C"]:
        """``J Δθ`` for a step in the parameters: tensors by name (others do not move), or one flat vector."""
        real = step if isinstance(step, Tensor) else {name: real_view(part) for name, part in step.items()}
        flat = real if isinstance(real, Tensor) else flat_metric(real, self.jacobian.parameters, "step")
        with torch.no_grad():
            moved = flat.detach().to(dtype=self.jacobian.dtype, device=self.jacobian.device)
            return self.jacobian.matvec(moved).reshape(self.outputs.shape)

    def _start(self, name: str, value: Tensor) -> Tensor:
        start = self.jacobian.parameters.get(name)
        if start is None or start.shape != value.shape:
            known = "no such parameter" if start is None else f"shape {tuple(start.shape)} there"
            raise InputError(
                f"parameters must be those of the linearised model, but {name!r} of shape {tuple(value.shape)} has "
                f"{known}. It has {', '.join(list(self.jacobian.parameters)[:6])} ..."
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
    return LinearizedModel(JacobianOperator(model, x, outputs, frozen, precision))
