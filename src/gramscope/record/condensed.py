"""Few numbers in place of very many outputs (a vocabulary of logits at every token): the loss, and random mixtures."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.capture.network import Outputs, count_examples, evaluate
from gramscope.capture.projection import project
from gramscope.record.judge import Judge

EXACT_OUTPUTS = 16  # up to so many outputs an example, each has a backward pass of its own
MIXTURES, SEED = 4, 0  # beyond, so many random mixtures of all outputs


def has_many_outputs(judge: Judge) -> bool:
    return judge.size > EXACT_OUTPUTS


class Condensed:
    """Outputs (n, 1 + k) of (model, x): the loss to first order, and k random mixtures of all outputs.

    The first, ``Σ_c e_μc f_μc`` with ``e = ∂loss/∂f`` held, has the gradient of the loss as the sum over its examples.
    The others are those of ``gs.project(k)``. ``f`` (n, C) are the outputs, ``value`` is the loss and ``residual`` is
    e; ``failure`` says why there is no loss.
    """

    def __init__(self, judge: Judge, y: Tensor | None, outputs: Outputs) -> None:
        self.judge, self.y, self.outputs = judge, y, outputs
        self.projection = project(MIXTURES, SEED)
        self.f: Tensor | None = None
        self.value, self.residual = float("nan"), torch.zeros(())
        self.failure: Exception | None = None

    def __call__(self, model: nn.Module, x: Any) -> Float[Tensor, "n few"]:
        f = evaluate(model, x, count_examples(x), self.outputs)
        if self.f is None:  # later calls are of some examples alone, to see where the weights are
            self.f = f.detach()
            self._judge()
        along = torch.linalg.vecdot(self.residual[: len(f)], f) if self.residual.dim() else f.sum(1)
        return torch.cat([along[:, None], self.projection.mix(f).to(f.dtype)], 1)

    def _judge(self) -> None:
        if self.f is None or self.y is None:
            return
        try:
            self.value, self.residual = loss_and_residual(self.judge, self.f, self.y)
        except Exception as error:
            self.failure = error


def loss_and_residual(judge: Judge, f: Float[Tensor, "n C"], y: Tensor) -> tuple[float, Float[Tensor, "n C"]]:
    """The loss and its gradient at the outputs."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        value = judge.loss(f, y.to(f.device))
        (residual,) = torch.autograd.grad(value, f)
    return float(value.detach()), residual
