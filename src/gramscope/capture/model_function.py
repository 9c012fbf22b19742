"""A model as a function of its parameters, at copies of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

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
    prepare_input,
)
from gramscope.capture.side_effects import (
    CopyOnWrite,
    in_modes,
    open_recurrences,
    plain_execution,
    unscale_tables,
    untouched,
)

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
        self._complex = [p.is_complex() for p in chosen.values()]
        # A complex parameter is two real ones.
        self.parameters = {name: real_view(p.detach()).clone() for name, p in chosen.items()}
        self._chosen = [id(p) for p in chosen.values()]
        self._buffers = {id(b): b.detach().clone() for b in self.model.buffers()}
        replaced = {*self._chosen, *self._buffers}
        # Every place of every module that holds one of these, and which it holds.
        self._places: list[tuple[Any, str, int]] = [
            (registry, name, id(tensor))
            for module in self.model.modules()
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
            if id(tensor) in replaced
        ]

    @contextmanager
    def context(self, forward: bool = True) -> Iterator[CopyOnWrite]:
        """The model as it was when this was made, every operation open to differentiation; all put back after.

        Without a ``forward`` pass inside no operation is watched for writing to parameters.
        """
        with ExitStack() as stack:
            written = stack.enter_context(untouched(self.model, throughout=forward))
            stack.enter_context(exact_arithmetic(self.tf32, self._autocast))
            stack.enter_context(plain_execution())
            stack.enter_context(open_recurrences(self.model))
            stack.enter_context(in_modes(self._modes))
            unscale_tables(self.model)
            yield written

    def at(self, parameters: Sequence[Tensor], work: Callable[[], R]) -> R:
        """``work()`` with ``parameters`` in the model; to be called within ``context``."""
        pairs = zip(parameters, self._complex, strict=True)
        own = [torch.view_as_complex(p) if pair else p for p, pair in pairs]
        values = {place: buffer.clone() for place, buffer in self._buffers.items()}
        values |= dict(zip(self._chosen, own, strict=True))
        with ExitStack() as stack:
            for registry, name, place in self._places:
                if name in registry:  # the user may have rebuilt the module since
                    stack.callback(registry.__setitem__, name, registry[name])
                    registry[name] = values[place]
            return work()

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
