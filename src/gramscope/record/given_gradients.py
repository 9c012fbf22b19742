"""The gradients that the optimiser is given: do two in a row point the same way, and are they zero or not finite?"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.capture.network import named_parameters

ENTRIES = 2**16  # of all gradients, evenly spaced, that are compared


class GivenGradients:
    """Looks at ``.grad`` before a step that will be measured, and before the one after it.

    ``overlap``: cosine of these two, with the step of the first. ``zeros``: share of entries that are exactly zero.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, next_step: Callable[[], int | None]) -> None:
        self._model, self._next_step = model, next_step
        self._before: Tensor | None = None
        self._overlap: float | None = None
        self._zeros: float | None = None
        self._hook = optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        """Called before the optimiser's step."""
        if torch.compiler.is_compiling():
            return
        due = self._next_step() is not None
        if not due and self._before is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moved = [p for p in named_parameters(self._model).values() if id(p) in held]
        now = sample([p.grad for p in moved if p.grad is not None])
        if self._before is not None and now is not None and len(now) == len(self._before):
            norms, product = torch.stack([now.norm() * self._before.norm(), now @ self._before]).tolist()
            self._overlap = product / norms if norms > 0 else None
        self._before = now if due else None
        if due and now is not None:
            self._zeros = float((now == 0).double().mean())

    def take(self) -> dict[str, float]:
        """What was found since it was asked for last."""
        found = {"gradient_overlap": self._overlap, "gradient_zeros": self._zeros}
        self._overlap = self._zeros = None
        return {name: value for name, value in found.items() if value is not None}

    def remove(self) -> None:
        self._hook.remove()
        self._before = None


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
