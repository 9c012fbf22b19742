"""A network linearised at its parameters: products with the Jacobian and its transpose, each one graph traversal.

Neither runs the network again (see ``gramscope.capture.linear_map``). Convolutions on a GPU are the exception: there
forward mode is faster, and ``J v`` runs the network once more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.backward_graph import is_out_of_memory
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.model_function import ModelFunction
from gramscope.capture.network import Outputs, Precision
from gramscope.kernels.expansion import flat_metric, load_forward_mode
from gramscope.kernels.twice_differentiable import TwiceDifferentiable

R = TypeVar("R")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Linearization:
    """``f(θ + v) ≈ f + J v`` at copies of the parameters, so that later training does not disturb it."""

    def __init__(
        self,
        model: nn.Module,
        x: ModelInput,
        outputs: Outputs = None,
        frozen: bool = False,
        precision: Precision = None,
    ) -> None:
        self._function = ModelFunction(model, x, outputs, frozen, precision)
        self.parameters = {name: p.requires_grad_() for name, p in self._function.parameters.items()}
        # On an H200, J v of a ResNet-18 took 0.154 s twice backward and about 0.04 s forward.
        modules = list(self._function.model.modules())
        self._forward_mode = tensors_in(x)[0].is_cuda and any(isinstance(m, CONVOLUTIONS) for m in modules)
        self._forward_checked = False
        self._written_out = False  # operations without a second derivative run as others, once one is met
        self.f: Tensor = self._within(self._function.outputs_with_graph)
        self._map = LinearMap([self.f], self._point, quiet=True)
        self.rows = Axes(example=self.f.shape[0], output=self.f.shape[1])
        self.cols = Axes(parameter=sum(p.numel() for p in self.parameters.values()))
        self.dtype = torch.promote_types(self.f.dtype, torch.float32)
        self.device = self.f.device

    @property
    def _point(self) -> list[Tensor]:
        return list(self.parameters.values())

    def _within(self, work: Callable[[], R]) -> R:
        """``work()`` with the model at the parameters of this linearisation."""
        with self._function.context():
            return self._function.at(self._point, work)

    @property
    def slow(self) -> str:
        """Why ``J v`` is taken row by row, as far as is known; empty where it is not."""
        return self._map.slow

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        if vectors.shape[1] == 0:
            return vectors.new_zeros(self.rows.size, 0)
        tangents = self._function.split(vectors)
        result = self._within(lambda: self._forward(tangents) if self._forward_mode else self._backward(tangents))
        return result.reshape(vectors.shape[1], -1).T.to(self.dtype)

    def _forward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        try:
            if not self._forward_checked:
                self._forward_mode = self._map.check(self._check_forward)
                self._forward_checked = True
            return self._run_forward(tangents) if self._forward_mode else self._backward(tangents)
        except (RuntimeError, NotImplementedError) as error:  # an operation that has no forward derivative
            if is_out_of_memory(error):
                raise
            self._forward_mode = False
            return self._backward(tangents)

    def _check_forward(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        return [self._run_forward(self._function.split(self._function.join(tangents, 1)))]

    def _run_forward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        load_forward_mode()
        here = tuple(p.detach() for p in self._point)

        def outputs(*parameters: Tensor) -> Tensor:
            return self._function.at(parameters, self._function.evaluate)

        each = [torch.func.jvp(outputs, here, tuple(t[k] for t in tangents))[1] for k in range(len(tangents[0]))]
        return torch.stack(each)

    def _backward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        (result,) = self._map.jvp(tangents, len(tangents[0]))
        if self._written_out or (not self._map.slow and bool(torch.isfinite(result).all())):
            return result
        # Once more with those operations written in others that torch cannot differentiate twice, or not to a finite
        # number (logcumsumexp).
        self._written_out = True
        with TwiceDifferentiable():
            self.f = self._function.evaluate()
        self._map = LinearMap([self.f], self._point)
        return self._map.jvp(tangents, len(tangents[0]))[0]

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``Jᵀ w`` for each column w."""
        with self._function.context():
            return self._function.vjp(self._map, vectors)

    def flat(self, values: Mapping[str, Tensor | float]) -> Float[Tensor, " p"]:
        """Numbers or tensors by parameter name as one flat vector; parameters that are not named get zero."""
        return flat_metric(values, self.parameters).to(dtype=self.dtype, device=self.device)

    def split(self, vector: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """A flat vector over the parameters as tensors by name."""
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        return {name: piece.view(p.shape) for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)}
