"""A network linearised at its parameters: products with the Jacobian and its transpose, each one graph traversal.

``g(c) = Jᵀ c`` is computed once with a graph, linear in the placeholder c. Then ``Jᵀ w`` is one backward pass through
the network's graph, and ``J v`` one backward pass through the graph of g: neither runs the network again. Convolutions
on a GPU are the exception: there forward mode is faster, and ``J v`` runs the network once more.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.errors import UnsupportedError
from gramscope.base.nested import tensors_in
from gramscope.capture.batched import batched_gradients_or_zeros
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
            self._placeholder = torch.zeros_like(self.f, requires_grad=True)
            self._transposed = None if self._forward_mode else self._graph_of_transpose()
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

    def _graph_of_transpose(self) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            self.f, tuple(self.parameters.values()), self._placeholder, create_graph=True, allow_unused=True
        )

    def _write_out(self, error: RuntimeError) -> None:
        """Once more with the operations that torch differentiates once written in others."""
        if self._written_out:
            raise UnsupportedError(
                f"a matrix-free product needs operations that torch can differentiate twice, but {_first_line(error)} "
                "Use gs.ntk, which needs one derivative, or write the operation in others."
            ) from error
        self._written_out = True
        with (
            untouched(self._evaluation), exact_arithmetic(self.tf32), plain_execution(), in_modes(self._modes),
            _twice_differentiable(self._evaluation),
        ):  # fmt: skip
            self.f = self._run(tuple(self.parameters.values()))
            self._transposed = self._graph_of_transpose()

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        pieces = torch.split(vectors.T, [p.numel() for p in self.parameters.values()], dim=1)
        tangents = [
            piece.reshape(-1, *p.shape).to(p.dtype) for piece, p in zip(pieces, self.parameters.values(), strict=True)
        ]
        if vectors.shape[1] == 0:
            return vectors.new_zeros(self.rows.size, 0)
        with exact_arithmetic(self.tf32):
            result = self._forward(tangents) if self._forward_mode else self._twice_backward(tangents)
        return result.reshape(vectors.shape[1], -1).T.to(self.dtype)

    def _forward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        load_forward_mode()
        here = tuple(p.detach() for p in self.parameters.values())
        try:
            with untouched(self._evaluation), plain_execution(), in_modes(self._modes):
                each = [
                    torch.func.jvp(lambda *p: self._run(p), here, tuple(t[k] for t in tangents))[1]
                    for k in range(len(tangents[0]))
                ]
            return torch.stack(each)
        except (RuntimeError, NotImplementedError):  # an operation that has no forward derivative
            self._forward_mode = False
            return self._twice_backward(tangents)

    def _twice_backward(self, tangents: list[Tensor]) -> Float[Tensor, "k n C"]:
        if self._transposed is None:
            with torch.enable_grad(), _twice_differentiable(self._evaluation):
                self._transposed = self._graph_of_transpose()
        used = [(g, t) for g, t in zip(self._transposed, tangents, strict=True) if g is not None and g.requires_grad]
        if not used:
            return self.f.new_zeros(len(tangents[0]), *self.f.shape)
        try:
            (result,) = batched_gradients_or_zeros([g for g, _ in used], (self._placeholder,), [t for _, t in used])
        except RuntimeError as error:
            if not _not_implemented(error):
                raise
            self._write_out(error)
            return self._twice_backward(tangents)
        if not bool(torch.isfinite(result).all()) and all(bool(torch.isfinite(t).all()) for t in tangents):
            # J v is finite where J is; torch's second derivative of some operations is not (logcumsumexp).
            self._write_out(RuntimeError("the second derivative of one of them is not finite."))
            return self._twice_backward(tangents)
        return result

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``Jᵀ w`` for each column w."""
        if vectors.shape[1] == 0:
            return vectors.new_zeros(self.cols.size, 0)
        cotangents = vectors.T.reshape(-1, *self.f.shape).to(self.f.dtype)
        with exact_arithmetic(self.tf32):
            gradients = batched_gradients_or_zeros([self.f], tuple(self.parameters.values()), [cotangents])
        return torch.cat([g.reshape(vectors.shape[1], -1) for g in gradients], dim=1).T.to(self.dtype)

    def flat(self, values: Mapping[str, Tensor | float]) -> Float[Tensor, " p"]:
        """Numbers or tensors by parameter name as one flat vector; parameters that are not named get zero."""
        return flat_metric(values, self.parameters).to(dtype=self.dtype, device=self.device)

    def split(self, vector: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """A flat vector over the parameters as tensors by name."""
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        return {name: piece.view(p.shape) for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)}


def _not_implemented(error: RuntimeError) -> bool:
    """torch says so in words or by the type of the error."""
    return isinstance(error, NotImplementedError) or "is not implemented" in str(error)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]


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
