"""A network linearised at its parameters: products with the Jacobian and its transpose, each one graph traversal.

Neither runs the network again (see ``gramscope.capture.linear_map``). Convolutions on a GPU are the exception: there
forward mode is faster, and ``J v`` runs the network once more.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.nested import tensors_in
from gramscope.capture.batched import is_out_of_memory
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.network import (
    Evaluation,
    Outputs,
    check_model,
    count_examples,
    parameter_slots,
    prepare_input,
)
from gramscope.capture.precision import Precision, at_precision, check_precision
from gramscope.capture.surroundings import exact_arithmetic, in_modes, plain_execution, untouched
from gramscope.kernels.expansion import RandomStreams, flat_metric, load_forward_mode
from gramscope.kernels.written_out import WrittenOut

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Linearization:
    """``f(θ + v) ≈ f + J v`` at copies of the parameters, so that later training does not disturb it."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        outputs: Outputs = None,
        frozen: bool = False,
        precision: Precision = None,
    ) -> None:
        check_precision(precision)
        count_examples(x)
        model, x = at_precision(model, x, precision)
        self.tf32 = precision == "tf32"
        # On an H200, J v of a ResNet-18 took 0.154 s twice backward and about 0.04 s forward.
        convolutions = any(isinstance(module, CONVOLUTIONS) for module in model.modules())
        self._forward_mode = convolutions and tensors_in(x)[0].is_cuda
        self._forward_checked = False
        self._written_out = False  # operations without a second derivative run as others, once one is met
        self._evaluation, self._x = Evaluation(model, outputs), x
        self._modes = [(module, module.training) for module in model.modules()]
        self._streams = RandomStreams()  # J v and Jᵀ w belong to one draw of the dropout masks
        with untouched(model), exact_arithmetic(self.tf32), plain_execution(), _twice_differentiable(model):
            chosen = check_model(model, x, frozen)
            self._slots = parameter_slots(model, list(chosen.values()))
            self.parameters = {clean: p.detach().clone().requires_grad_() for clean, p in chosen.items()}
            self._fixed = {f"model.{name}": b.clone() for name, b in model.named_buffers()}
            self.f: Tensor = self._run(tuple(self.parameters.values()))
            self._map = self._linear_map(quiet=True)
        self.rows = Axes(example=self.f.shape[0], output=self.f.shape[1])
        self.cols = Axes(parameter=sum(p.numel() for p in self.parameters.values()))
        self.dtype = torch.promote_types(self.f.dtype, torch.float32)
        self.device = self.f.device

    def _run(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The outputs at other parameters, everything else as it was."""
        self._streams.rewind()
        swapped = {f"model.{name}": parameters[place] for name, place in self._slots}
        fixed = {name: buffer.clone() for name, buffer in self._fixed.items()}
        given = prepare_input(self._x)  # a model may overwrite its input
        with WrittenOut() if self._written_out else nullcontext():
            return torch.func.functional_call(self._evaluation, {**fixed, **swapped}, (given,), tie_weights=False)

    def _linear_map(self, quiet: bool) -> LinearMap:
        return LinearMap([self.f], list(self.parameters.values()), quiet=quiet)

    @property
    def slow(self) -> str:
        """Why ``J v`` is taken row by row, as far as is known; empty where it is not."""
        return self._map.slow

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        if vectors.shape[1] == 0:
            return vectors.new_zeros(self.rows.size, 0)
        pieces = torch.split(vectors.T, [p.numel() for p in self.parameters.values()], dim=1)
        tangents = [
            piece.reshape(-1, *p.shape).to(p.dtype) for piece, p in zip(pieces, self.parameters.values(), strict=True)
        ]
        with exact_arithmetic(self.tf32), _twice_differentiable(self._evaluation):
            result = self._forward(tangents) if self._forward_mode else self._backward(tangents)
        return result.reshape(vectors.shape[1], -1).T.to(self.dtype)

    def _forward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        try:
            if not self._forward_checked:
                self._forward_mode = self._map.check(lambda v: [self._run_forward(_filled(v, self.parameters))])
                self._forward_checked = True
            return self._run_forward(tangents) if self._forward_mode else self._backward(tangents)
        except (RuntimeError, NotImplementedError) as error:  # an operation that has no forward derivative
            if is_out_of_memory(error):
                raise
            self._forward_mode = False
            return self._backward(tangents)

    def _run_forward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        load_forward_mode()
        here = tuple(p.detach() for p in self.parameters.values())
        with untouched(self._evaluation), plain_execution(), in_modes(self._modes):
            each = [
                torch.func.jvp(lambda *p: self._run(p), here, tuple(t[k] for t in tangents))[1]
                for k in range(len(tangents[0]))
            ]
        return torch.stack(each)

    def _backward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        (result,) = self._map.jvp(tangents, len(tangents[0]))
        if self._written_out or (not self._map.slow and bool(torch.isfinite(result).all())):
            return result
        # Once more with those operations written in others that torch cannot differentiate twice, or not to a finite
        # number (logcumsumexp).
        self._written_out = True
        with untouched(self._evaluation), plain_execution(), in_modes(self._modes):
            self.f = self._run(tuple(self.parameters.values()))
        self._map = self._linear_map(quiet=False)
        return self._map.jvp(tangents, len(tangents[0]))[0]

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``Jᵀ w`` for each column w."""
        if vectors.shape[1] == 0:
            return vectors.new_zeros(self.cols.size, 0)
        cotangents = vectors.T.reshape(-1, *self.f.shape).to(self.f.dtype)
        with exact_arithmetic(self.tf32):
            gradients = _filled(self._map.vjp([cotangents]), self.parameters, vectors.shape[1])
        return torch.cat([g.reshape(vectors.shape[1], -1) for g in gradients], dim=1).T.to(self.dtype)

    def flat(self, values: Mapping[str, Tensor | float]) -> Float[Tensor, " p"]:
        """Numbers or tensors by parameter name as one flat vector; parameters that are not named get zero."""
        return flat_metric(values, self.parameters).to(dtype=self.dtype, device=self.device)

    def split(self, vector: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """A flat vector over the parameters as tensors by name."""
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        return {name: piece.view(p.shape) for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)}


def _filled(vectors: Sequence[Tensor | None], parameters: Mapping[str, Tensor], count: int = 1) -> list[Tensor]:
    """Zeros for None."""
    pairs = zip(vectors, parameters.values(), strict=True)
    return [p.new_zeros(count, *p.shape) if v is None else v for v, p in pairs]


@contextmanager
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """cuDNN's recurrent kernels cannot be differentiated twice; torch's own can."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not recurrent
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
