"""The Jacobian of a network as an operator, the tangent kernel as a product of two, and the linearised network.

Products with J and Jᵀ are one graph traversal each and do not run the network again (``gramscope.capture.linear_map``).
Convolutions on a GPU are the exception: there forward mode is faster, and ``J v`` runs the network once more.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.backward_graph import is_out_of_memory
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.model_function import ModelFunction
from gramscope.capture.network import Outputs, Precision, named_parameters, unwrap
from gramscope.kernels.expansion import Rates, flat_metric, load_forward_mode
from gramscope.linalg import Composition, Diagonal, LinearOperator
from gramscope.ops.kinks import TwiceDifferentiable


class JacobianOperator(LinearOperator):
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
        self._function = function = ModelFunction(model, x, outputs, frozen, precision)
        self.parameters = {name: p.requires_grad_() for name, p in function.parameters.items()}
        self._point = list(self.parameters.values())
        # On an H200, J v of a ResNet-18 took 0.154 s twice backward and about 0.04 s forward.
        convolutional = any(isinstance(module, nn.modules.conv._ConvNd) for module in function.model.modules())
        self._forward_mode = convolutional and tensors_in(x)[0].is_cuda
        self._forward_checked = False
        self._written_out = False  # operations without a second derivative run as others, once one is met
        with function.context():
            self.f: Float[Tensor, "n C"] = function.at(self._point, function.outputs_with_graph)
        self._map = LinearMap([self.f], self._point, quiet=True)
        rows = Axes(example=self.f.shape[0], output=self.f.shape[1])
        cols = Axes(parameter=sum(p.numel() for p in self._point))
        super().__init__(rows, cols, dtype=torch.promote_types(self.f.dtype, torch.float32), device=self.f.device)

    @property
    def slow(self) -> str:
        """Why ``J v`` takes one backward pass for each output, as far as is known; empty where it does not."""
        return self._map.slow

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        with self._function.context():
            found = self._forward(x) if self._forward_mode else None
            return self._backward(x) if found is None else found

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        with self._function.context():
            return self._function.vjp(self._map, x)

    def _forward(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"] | None:
        """``J v`` by forward mode, which is checked at its first use; None where it does not serve."""
        function = self._function
        try:
            if not self._forward_checked:
                self._forward_mode = function.at(self._point, lambda: self._map.check(
                    lambda parts: [self._run_forward(function.join(parts, 1)).T.reshape(1, *self.f.shape)]
                ))  # fmt: skip
                self._forward_checked = True
            return self._run_forward(vectors) if self._forward_mode else None
        except (RuntimeError, NotImplementedError) as error:  # an operation that has no forward derivative
            if is_out_of_memory(error):
                raise
            self._forward_mode = False
            return None

    def _run_forward(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        load_forward_mode()
        function, here = self._function, tuple(p.detach() for p in self._point)

        def outputs(*parameters: Tensor) -> Tensor:
            return function.at(parameters, function.evaluate)

        each = [torch.func.jvp(outputs, here, tangents)[1] for tangents in zip(*function.split(vectors), strict=True)]
        return torch.stack(each).flatten(1).T.to(self.dtype)

    def _backward(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        result = self._function.jvp(self._map, vectors)
        if self._written_out or (not self._map.slow and bool(torch.isfinite(result).all())):
            return result
        # Once more with those operations written in others that torch cannot differentiate twice, or not to a finite
        # number (logcumsumexp).
        self._written_out = True
        with TwiceDifferentiable():
            self.f = self._function.at(self._point, self._function.evaluate)
        self._map = LinearMap([self.f], self._point)
        return self._function.jvp(self._map, vectors)


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
        flat = real if isinstance(real, Tensor) else flat_metric(real, self.jacobian.parameters)
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
