"""A model as a function of its parameters, at copies of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from gramscope.base.arithmetic import autocast_in_force, exact_arithmetic
from gramscope.base.complex_numbers import real_view
from gramscope.base.nested import ModelInput
from gramscope.base.streams import RandomStreams
from gramscope.capture.network import (
    Outputs,
    Precision,
    at_precision,
    check_model,
    check_precision,
    count_examples,
    evaluate,
    loss_input,
    parameter_slots,
    prepare_input,
)
from gramscope.capture.side_effects import in_modes, open_recurrences, plain_execution, unscale_tables, untouched

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
            unscale_tables(self.model)
            yield

    def at(self, parameters: Sequence[Tensor], work: Callable[[], R]) -> R:
        """``work()`` with ``parameters`` in the model; to be called within ``context``."""
        pairs = zip(parameters, self._complex, strict=True)
        own = [torch.view_as_complex(p) if pair else p for p, pair in pairs]
        swapped = {f"model.{name}": own[place] for name, place in self._slots}
        fixed = {name: buffer.clone() for name, buffer in self._buffers.items()}
        return torch.func.functional_call(self._holder, {**fixed, **swapped}, (work,), tie_weights=False)

    def evaluate(self, x: ModelInput = None) -> Tensor:
        """The outputs (n, C), of other examples if given, with the random numbers of when this was made."""
        self._streams.rewind()
        # A model may overwrite its input.
        given = prepare_input(self.x) if x is None else x
        return evaluate(self.model, given, count_examples(given), self.outputs)

    def loss_input(self) -> Tensor:
        """The same outputs as a loss is given them."""
        self._streams.rewind()
        return loss_input(self.model, prepare_input(self.x), self.examples, self.outputs)


class _Holder(nn.Module):
    """Holds the model for torch to swap its parameters, while anything at all is done."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], R]) -> R:
        return work()
