"""What the optimiser's last step did to each weight: the true update, seen from hooks of the optimiser."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.capture.network import named_parameters
from gramscope.measures.norms import norms
from gramscope.record.subject import layer_of


class Sizes(NamedTuple):
    """Norms over the parameters of a layer: of the update, of the weights before it, of the gradient it was given."""

    update: float
    weight: float
    gradient: float


class LastUpdate:
    """Keeps a copy of the weights before a step that will be measured; until then one copy of the model's memory."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, next_step: Callable[[], int | None]) -> None:
        self._model, self._next_step = model, next_step
        self._step: int | None = None
        self._before: dict[str, Tensor] = {}
        self._gradients: dict[str, float] = {}
        self._hook = optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        """Called before the optimiser's step. ``next_step`` is its number, or None where it will not be measured."""
        if torch.compiler.is_compiling():
            return
        self._step = self._next_step()
        self._before.clear()
        if self._step is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moved = {name: p for name, p in named_parameters(self._model).items() if id(p) in held}
        self._before = {name: p.detach().clone() for name, p in moved.items()}
        given = norms({name: p.grad for name, p in moved.items() if p.grad is not None})
        self._gradients = dict.fromkeys(moved, 0.0) | given

    def sizes(self, step: int) -> dict[str, Sizes]:
        """By layer, if ``step`` is the one that was noted; the copy is let go."""
        before, self._before = self._before, {}
        if step != self._step:
            return {}
        named = named_parameters(self._model)
        before = {name: old for name, old in before.items() if name in named and named[name].shape == old.shape}
        weights = norms(before)
        moved = {name: old if old.dtype.itemsize >= 4 else old.float() for name, old in before.items()}
        if moved:  # the copies are ours: they become old - new
            torch._foreach_sub_(list(moved.values()), [named[name].detach() for name in moved])
        changes = norms(moved)
        parts: dict[str, list[Sizes]] = {}
        for name in before:
            parts.setdefault(layer_of(name), []).append(Sizes(changes[name], weights[name], self._gradients[name]))
        return {layer: Sizes(*(math.hypot(*sizes) for sizes in zip(*own, strict=True))) for layer, own in parts.items()}

    def remove(self) -> None:
        self._hook.remove()
        self._before.clear()
