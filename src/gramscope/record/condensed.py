"""Few numbers in place of very many outputs (a vocabulary of logits at every token): the loss, and random mixtures."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gramscope.base.nested import ModelInput
from gramscope.capture.network import Outputs, Precision, count_examples, evaluate
from gramscope.capture.projection import Projection, project
from gramscope.record.objective import Objective

EXACT_OUTPUTS = 32  # up to so many outputs an example, each has a backward pass of its own
MIXTURES = 4  # beyond, so many random mixtures of all outputs
FEW_MIXTURES = 2  # and so many of a vocabulary at every position: each costs about two training steps of the probe
SEED = 0
CHUNK = 2**22  # outputs whose signs are floats at one time


def has_many_outputs(objective: Objective) -> bool:
    return objective.size > EXACT_OUTPUTS


def rehearses_losses(objective: Objective) -> bool:
    """Is a step explained by the loss of each example, because its outputs are a vocabulary at every position?"""
    return has_many_outputs(objective) and objective.by_position and objective.own is None


def make_signs(objective: Objective, device: torch.device) -> Int8[Tensor, "C k"]:
    """The signs of ``mixing``, kept in one byte each: they are the same at every measurement."""
    mixtures, like = mixing(objective), torch.empty(0, dtype=torch.int8, device=device)
    steps = range(0, objective.size, CHUNK)
    return torch.cat([mixtures.signs(start, min(start + CHUNK, objective.size), like) for start in steps])


def precision_of(model: nn.Module) -> Precision:
    """On a GPU float32 products are TF32's: their error, 1e-3, is far below that of the mixtures."""
    return "tf32" if next(model.parameters()).is_cuda else None


def mixing(objective: Objective) -> Projection:
    """The random mixtures of the outputs, as ``gs.project`` makes them."""
    return project(FEW_MIXTURES if objective.by_position else MIXTURES, SEED)


def passes_of_kernel(objective: Objective) -> int:
    """How many shared passes the kernel of a language model is worth: its own, and one for each mixture; else 0."""
    return 1 + mixing(objective).k if has_many_outputs(objective) and objective.by_position else 0


class Condensed:
    """Outputs (n, 1 + k) of (model, x): the loss to first order, and k random mixtures of all outputs.

    The first, ``Σ_c e_μc f_μc`` with ``e = ∂loss/∂f`` held, has the gradient of the loss as the sum over its examples.
    The others are those of ``gs.project(k)``. The outputs f (n, C) themselves are let go: what is said of them
    (``value`` of the loss, ``accuracy``, some ``rows``) is read off at once. ``failure`` says why there is no loss.
    """

    def __init__(
        self,
        objective: Objective,
        y: Tensor | None,
        outputs: Outputs,
        signs: Int8[Tensor, "C k"],
        places: Tensor | None,
    ) -> None:
        self.objective, self.y, self.outputs, self.signs, self.places = objective, y, outputs, signs, places
        self.value = float("nan")
        self.accuracy: float | None = None
        self.residual: Tensor | None = None
        self.rows: Tensor | None = None
        self.failure: Exception | None = None

    def __call__(self, model: nn.Module, x: ModelInput) -> Float[Tensor, "n few"]:
        f = evaluate(model, x, count_examples(x), self.outputs)
        if self.residual is None:  # later calls are of some examples alone, to see where the weights are
            self._look(f.detach())
        assert self.residual is not None
        few: Tensor = _Few.apply(f, self.residual[: len(f)], self.signs)  # type: ignore[no-untyped-call]
        return few

    def _look(self, f: Float[Tensor, "n C"]) -> None:
        self.rows = f if self.places is None else self.objective.by_class(f)[self.places.to(f.device)]
        self.residual = torch.ones_like(f[:, :1]).expand_as(f)  # the sum of the outputs, where there is no loss
        if self.y is None:
            return
        try:
            self.value, self.residual = loss_and_residual(self.objective, f, self.y)
            self.accuracy = self.objective.accuracy(f, self.y.to(f.device))
        except Exception as error:
            self.failure = error


class _Few(torch.autograd.Function):
    """``(Σ_c e_c f_c, f S / √k)``. Only the signs, one byte each, and e are held for the backward pass."""

    keeps_places = True  # to the search for weight sites: no entry moves by the values of data

    @staticmethod
    def forward(ctx: FunctionCtx, f: Tensor, residual: Tensor, signs: Tensor) -> Tensor:
        ctx.save_for_backward(residual, signs)
        few = f.new_zeros(len(f), 1 + signs.shape[1])
        for some in _chunks(signs):
            part = f[:, some]
            few[:, 0] += (residual[:, some] * part).sum(1)
            few[:, 1:] += part @ signs[some].to(f.dtype)
        few[:, 1:] /= signs.shape[1] ** 0.5
        return few

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        residual, signs = ctx.saved_tensors  # type: ignore[attr-defined]
        (given,) = gradients
        along, mixed = given[:, :1], given[:, 1:] / signs.shape[1] ** 0.5
        if len(signs) <= CHUNK:
            return along * residual + mixed @ signs.to(given.dtype).T, None, None
        found = torch.empty_like(residual, memory_format=torch.contiguous_format)
        for some in _chunks(signs):
            torch.mm(mixed, signs[some].to(given.dtype).T, out=found[:, some])
            found[:, some].addcmul_(along, residual[:, some])
        return found, None, None


def _chunks(signs: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, len(signs), CHUNK)]


def loss_and_residual(objective: Objective, f: Float[Tensor, "n C"], y: Tensor) -> tuple[float, Float[Tensor, "n C"]]:
    """The loss and its gradient at the outputs."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        value = objective.loss(f, y.to(f.device))
        (residual,) = torch.autograd.grad(value, f)
    return float(value.detach()), residual
