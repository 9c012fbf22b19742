"""A forward pass that is kept alive, with named layers opened and every use of a weight: tangents are sent through it.

A ``Snapshot`` holds numbers. Transports between layers need the graph itself: which data tensor each weight met, how it
depends on a perturbation of a chosen layer, and the operation, to be run again on a tangent.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.nested import ModelInput, map_tensors, tensors_in
from gramscope.capture.backward_graph import check_differentiable
from gramscope.capture.capturing import ForwardOptions
from gramscope.capture.model_function import ModelFunction
from gramscope.capture.weight_uses import WeightUses, settle
from gramscope.ops.torch_calls import Args, Kwargs, TorchFunction, writes

R = TypeVar("R")
X = TypeVar("X")  # what a model takes, or a module gives
INPUT = "input"  # the name of layer 0, the model's input


@dataclass(frozen=True, eq=False)
class WeightUse:
    """``u = func(data..., weights...)``; ``edges`` carry the signals ∂f/∂u, one for each floating output."""

    func: TorchFunction
    args: Args
    kwargs: Kwargs
    data: tuple[Tensor, ...]  # live: they depend on the perturbed layer through the graph
    weights: tuple[Tensor, ...]  # parameters, or tensors made of them
    edges: tuple[GradientEdge, ...]

    def rerun(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Fresh leaves for data and weights, and the outputs that the operation makes of them."""
        data = [t.detach().requires_grad_() for t in self.data]
        weights = [t.detach().requires_grad_() for t in self.weights]
        fresh = {id(old): new for old, new in zip((*self.data, *self.weights), (*data, *weights), strict=True)}
        args, kwargs = map_tensors(lambda t: fresh.get(id(t), t.detach()), (self.args, self.kwargs))
        outputs = [t for t in tensors_in(self.func(*args, **kwargs)) if t.is_floating_point()]
        return data, weights, outputs


class _RetainedUses(WeightUses):
    """Keeps each use of a weight."""

    def __init__(self, parameters: dict[str, Tensor], examples: int) -> None:
        super().__init__(parameters.values(), examples)
        self.kept: list[WeightUse] = []

    def use(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if writes(func):
            raise UnsupportedError(
                f"a weight must not be written into data in place, but {func.__name__} does so. Write the model with "
                "the out-of-place operation."
            )
        operands = {id(t): t for t in tensors_in((args, kwargs))}.values()
        data = tuple(t for t in operands if self.is_data(t) and t.is_floating_point() and t.requires_grad)
        weights = tuple(t for t in operands if self.is_weight(t))
        self.note_met(weights)  # the operation will be run again
        output = map_tensors(settle, func(*args, **kwargs))
        made = [t for t in tensors_in(output) if t.is_floating_point()]
        if data and made:
            edges = tuple(get_gradient_edge(t) for t in made)
            self.kept.append(WeightUse(func, args, kwargs, data, weights, edges))
        return output


@dataclass(frozen=True, eq=False)
class RetainedRun:
    """One forward pass with named layers opened: perturbations δ that were added to them, and their values.

    ``f`` (n, C) and the layers depend on every δ through a graph that stays alive.
    """

    f: Tensor
    values: dict[str, Tensor]
    perturbations: dict[str, Tensor]
    uses: tuple[WeightUse, ...]
    parameters: dict[str, Tensor]
    function: ModelFunction

    def within(self, work: Callable[[], R]) -> R:
        """``work()``, going back through the graph, with the model as it was in this pass."""
        with self.function.context():
            return self.function.at(list(self.parameters.values()), work)


def open_layers(
    model: nn.Module, x: ModelInput, layers: Sequence[str], *, watch: bool = True, **options: Unpack[ForwardOptions]
) -> RetainedRun:
    """Run ``model`` once with a zero perturbation added to the output of each named module (``"input"``: to x).

    The model, its buffers, hooks and flags are as before when this returns; the graph keeps what it needs.
    """
    function = ModelFunction(model, x, **options)
    modules = dict(function.model.named_modules())
    for layer in layers:
        if layer != INPUT and not (layer and layer in modules):
            names = [name for name in modules if name]
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise InputError(f'layer must be "input" or the name of a module, got {layer!r}. There are: {shown}.')
    parameters = {name: p.requires_grad_() for name, p in function.parameters.items()}
    openings, uses = _Openings(), _RetainedUses(parameters, function.examples)

    def run() -> Tensor:
        given = function.x
        if INPUT in layers:
            given = openings.open(INPUT, given)
        uses.mark_data(given)
        with ExitStack() as stack:
            for name in layers:
                if name != INPUT:
                    stack.callback(modules[name].register_forward_hook(openings.hook(name)).remove)
            if watch:
                stack.enter_context(uses)
            return function.evaluate(given)

    with function.context():
        f = function.at(list(parameters.values()), run)
    check_differentiable(f)
    uses.check_intact()
    openings.check(layers)
    return RetainedRun(f, openings.values, openings.perturbations, tuple(uses.kept), parameters, function)


class _Openings:
    """Perturbations added to the first floating tensor of each layer's output."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.perturbations: dict[str, Tensor] = {}

    def open(self, name: str, output: X) -> X:
        first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
        if first is None:
            return output
        if name in self.values:
            raise UnsupportedError(
                f"layer {name!r} must be called once, but it is called again in the same forward pass. Wrap each call "
                "in a module of its own, e.g. torch.nn.Identity, and name that."
            )
        self.perturbations[name] = torch.zeros_like(first, requires_grad=True)
        opened = self.values[name] = first + self.perturbations[name]
        return map_tensors(lambda t: opened.clone() if t is first else t, output)  # the network may overwrite it

    def hook(self, name: str) -> Callable[[nn.Module, Args, object], object]:
        return lambda module, args, output: self.open(name, output)

    def check(self, layers: Sequence[str]) -> None:
        missing = [name for name in layers if name not in self.values]
        if INPUT in missing:
            raise InputError('layer "input" needs a floating input; token ids have none. Name the embedding instead.')
        if missing:
            raise InputError(
                f"layer {missing[0]!r} must give a floating tensor in the forward pass, but it was not called (or gave "
                "none). Name a module that the forward pass calls."
            )
