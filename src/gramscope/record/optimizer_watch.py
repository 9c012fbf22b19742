"""What an optimiser is given and what it does to the weights, seen from a hook before its step."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.capture.network import named_parameters
from gramscope.measures.norms import norms
from gramscope.record.signals import share_in_training
from gramscope.record.subject import layer_of

IDLE = 3  # measurements in a row without a step of the optimiser: it is not the one in use
ENTRIES = 2**16  # of all gradients, evenly spaced, that are compared


class Sizes(NamedTuple):
    """Norms over the parameters of a layer: of the update, of the weights before it, of the gradient it was given."""

    update: float
    weight: float
    gradient: float


class OptimizerWatch:
    """Before a step that will be measured, keeps a copy of the weights, which until then costs the model's memory.

    Of the gradients it keeps their norms; of those given to the first optimiser also a sample, which is compared with
    that of the step after it. ``training`` is the share of dropout and batch norm that was in training mode at the last
    step that was noted.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], next_step: Callable[[], int | None]) -> None:
        self._model, self._next_step, self._first = model, next_step, optimizers[0]
        self._step: int | None = None
        self._before: dict[str, Tensor] = {}
        self._norms: dict[str, float] = {}
        self._sample: Tensor | None = None
        self._found: dict[str, float] = {}
        self.training: float | None = None
        self._stepped, self._idle = False, 0  # since the last measurement; measurements in a row without a step
        self._hooks = [optimizer.register_step_pre_hook(self._note) for optimizer in optimizers]

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        """Called before the optimiser's step. ``next_step`` is its number, or None where it will not be measured."""
        self._stepped = True
        if torch.compiler.is_compiling():
            return
        step = self._next_step()
        if step is None or step != self._step:
            self._before.clear()
            self._norms.clear()
        self._step = step
        if step is None and self._sample is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moved = {name: p for name, p in named_parameters(self._model).items() if id(p) in held}
        given = {name: p.grad for name, p in moved.items() if p.grad is not None}
        if optimizer is self._first:
            self._compare(list(given.values()))
        if step is not None:
            self.training = share_in_training(self._model)
            self._before |= {name: p.detach().clone() for name, p in moved.items()}
            self._norms |= dict.fromkeys(moved, 0.0) | norms(given)

    def _compare(self, given: list[Tensor]) -> None:
        now, before = sample(given), self._sample
        if before is not None and now is not None and len(now) == len(before):
            sizes, product = torch.stack([now.norm() * before.norm(), now @ before]).tolist()
            self._found |= {"gradient_overlap": product / sizes} if sizes > 0 else {}
        self._sample = now if self._step is not None else None
        if self._step is not None:
            self._found |= {} if now is None else {"gradient_zeros": float((now == 0).double().mean())}

    def gradients(self) -> dict[str, float]:
        """Cosine of two gradients in a row, share of entries that are exactly zero; as found since the last call."""
        found, self._found = self._found, {}
        return found

    def is_idle(self) -> bool:
        """Whether no step was seen for some measurements; asked once a measurement. A gradient scaler may skip one."""
        self._idle = 0 if self._stepped else self._idle + 1
        self._stepped = False
        return self._idle >= IDLE

    def updates(self, step: int) -> dict[str, Sizes]:
        """By layer, if ``step`` is the one that was noted; the copy is let go."""
        before, self._before = self._before, {}
        if step != self._step:
            return {}
        named = named_parameters(self._model)
        before = {name: old for name, old in before.items() if name in named and named[name].shape == old.shape}
        weights = norms(before)
        moved = {name: old if old.dtype.itemsize >= 4 else old.float() for name, old in before.items()}
        if moved:  # the copies are ours: they become old - new
            with torch.no_grad():
                torch._foreach_sub_(list(moved.values()), [named[name] for name in moved])
        changes = norms(moved)
        parts: dict[str, list[Sizes]] = {}
        for name in before:
            parts.setdefault(layer_of(name), []).append(Sizes(changes[name], weights[name], self._norms[name]))
        return {layer: Sizes(*(math.hypot(*sizes) for sizes in zip(*own, strict=True))) for layer, own in parts.items()}

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._before.clear()
        self._sample = None


def sample(gradients: list[Tensor]) -> Tensor | None:
    """Some entries of all gradients, of each as many as belong to it, in float64; the same ones each time."""
    dense = [g.detach().to_dense() if g.is_sparse else g.detach() for g in gradients]
    total = sum(g.numel() for g in dense)
    if not total:
        return None
    stride = max(1, total // ENTRIES)
    some = [g.reshape(-1)[::stride] for g in dense]
    if len({g.device for g in some}) > 1:  # a model that lies on several devices
        some = [g.cpu() for g in some]
    return torch.cat(some).double()  # left on the device, which is waited for once, in the end
