"""A model as a function of its parameters, at copies of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.arithmetic import autocast_in_force, exact_arithmetic
from gramscope.base.complex_numbers import real_view
from gramscope.base.nested import ModelInput
from gramscope.base.streams import RandomStreams
from gramscope.capture.backward_graph import check_differentiable
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.network import (
    Outputs,
    Precision,
    at_precision,
    check_model,
    check_precision,
    count_examples,
    evaluate,
    parameter_slots,
    prepare_input,
)
from gramscope.capture.side_effects import in_modes, open_recurrences, plain_execution, untouched

R = TypeVar("R")


class ModelFunction:
    """``θ ↦ f(θ)`` on fixed examples: buffers, flags, autocast and dropout masks are those of when it was made.

    ``at`` puts tensors in the places of the model's parameters while some work is done. Going back through a graph is
    such work, too: a backward pass may call the model again (adjoint solvers do), and must meet the same tensors.
    """

    def __init__(self, model: nn.Module, x: ModelInput, outputs: Outputs, frozen: bool, precision: Precision) -> None:
        check_precision(precision)
        self.examples = count_examples(x)
        self.model, self.x = at_precision(model, x, precision)
        self.outputs, self.tf32 = outputs, precision == "tf32"
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._streams, self._autocast = RandomStreams(), autocast_in_force()
        with untouched(self.model):
            chosen = check_model(self.model, self.x, frozen)
        self._slots = parameter_slots(self.model, list(chosen.values()))
        self._complex = [p.is_complex() for p in chosen.values()]
        # A complex parameter is two real ones.
        self.parameters = {name: real_view(p.detach()).clone() for name, p in chosen.items()}
        self._buffers = {f"model.{name}": b.detach().clone() for name, b in self.model.named_buffers()}
        self._holder = _Holder(self.model)

    @contextmanager
    def context(self, forward: bool = True) -> Iterator[None]:
        """The model as it was when this was made, every operation open to differentiation; all put back after.

        Without a ``forward`` pass inside no operation is watched for writing to parameters.
        """
        with ExitStack() as stack:
            stack.enter_context(untouched(self.model, throughout=forward))
            stack.enter_context(exact_arithmetic(self.tf32, self._autocast))
            stack.enter_context(plain_execution())
            stack.enter_context(open_recurrences(self.model))
            stack.enter_context(in_modes(self._modes))
            yield

    def at(self, parameters: Sequence[Tensor], work: Callable[[], R]) -> R:
        """``work()`` with ``parameters`` in the model; to be called within ``context``."""
        pairs = zip(parameters, self._complex, strict=True)
        own = [torch.view_as_complex(p) if pair else p for p, pair in pairs]
        swapped = {f"model.{name}": own[place] for name, place in self._slots}
        fixed = {name: buffer.clone() for name, buffer in self._buffers.items()}
        return torch.func.functional_call(self._holder, {**fixed, **swapped}, (work,), tie_weights=False)

    def split(self, vectors: Float[Tensor, "p k"]) -> list[Tensor]:
        """Columns over all parameters as one tensor (k, *shape) for each parameter."""
        own = list(self.parameters.values())
        pieces = torch.split(vectors.T, [p.numel() for p in own], dim=1)
        # Copies: some operations (view_as_complex) take no tensor that begins at an odd place of another.
        pairs = zip(pieces, own, strict=True)
        return [piece.reshape(len(piece), *p.shape).to(p.dtype, copy=True) for piece, p in pairs]

    def join(self, parts: Sequence[Tensor | None], count: int) -> Float[Tensor, "p k"]:
        """The inverse of :meth:`split` for ``count`` columns; None stands for zeros."""
        pairs = zip(parts, self.parameters.values(), strict=True)
        filled = [p.new_zeros(count, *p.shape) if part is None else part for part, p in pairs]
        return torch.cat([part.reshape(count, -1) for part in filled], dim=1).T

    def vjp(self, graph: LinearMap, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``Jᵀ w`` for each column w, J the map from parameters in the model to one output (n, C)."""
        count, (f,) = vectors.shape[1], graph.outputs
        if count == 0:
            return vectors.new_zeros(sum(p.numel() for p in self.parameters.values()), 0)
        cotangents = vectors.T.reshape(count, *f.shape)
        found = self.at(graph.inputs, lambda: graph.vjp([cotangents]))
        return self.join(found, count).to(torch.promote_types(f.dtype, torch.float32))

    def jvp(self, graph: LinearMap, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        count, (f,) = vectors.shape[1], graph.outputs
        if count == 0:
            return vectors.new_zeros(f.numel(), 0)
        (found,) = self.at(graph.inputs, lambda: graph.jvp(self.split(vectors), count))
        return found.reshape(count, -1).T.to(torch.promote_types(f.dtype, torch.float32))

    def evaluate(self, x: ModelInput = None) -> Tensor:
        """The outputs (n, C), of other examples if given, with the random numbers of when this was made."""
        self._streams.rewind()
        # A model may overwrite its input.
        given = prepare_input(self.x) if x is None else x
        return evaluate(self.model, given, count_examples(given), self.outputs)

    def outputs_with_graph(self, x: ModelInput = None) -> Tensor:
        """The same, where every operation has a derivative."""
        f = self.evaluate(x)
        check_differentiable(f)
        return f


class _Holder(nn.Module):
    """Holds the model for torch to swap its parameters, while anything at all is done."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], R]) -> R:
        return work()
