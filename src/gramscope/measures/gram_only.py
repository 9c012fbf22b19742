"""An optimiser that takes only one part of its steps: the Gram-altering, or the Gram-preserving."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gramscope.base.checks import check_plain
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.network import named_parameters, unwrap
from gramscope.hierarchy.optimizer_step import inner_optimizer
from gramscope.measures.gram_split import Keep, Method, gram_only_step, split_step
from gramscope.measures.weight_matrices import MatrixForm, weight_forms

__all__ = ["GramOnly"]


class GramOnly:
    """From now on the optimiser takes only the Gram-altering (or Gram-preserving) part of its steps.

    After the optimiser has moved ``W₁ → W₂`` (momentum, weight decay and all), W becomes ``Q W₂``, which has the
    Gram matrix of W₂ and differs from W₁ by no needless turn; or, preserving, ``Qᵀ W₁``, which has that of W₁. A
    network that learns as well with the altering part alone learns through its Gram matrices.

    Two hooks on ``optimizer.step()`` do it: go on with your own optimiser, its schedulers, ``GradScaler`` and
    checkpoints. :meth:`remove` ends it, as does leaving a ``with`` block. A :class:`GramTracker` that shall see the
    step really taken is attached after it.

    Args:
        optimizer: a torch optimiser, or a wrapper of one (accelerate's).
        keep: "altering" or "preserving".
        method: "procrustes" keeps the Gram matrix exactly for steps of any size; "sylvester" adds the first-order part
            (W + altering, or W + preserving), which errs by the square of the step.
        others: parameters that are no matrices (biases, norms, embeddings): "pass" takes their step, "freeze" undoes
            it.
        model: tells groups of convolutions, transposed layouts, packed projections and embeddings from plain matrices,
            and gives names. Without it every parameter of two axes or more is (out, everything else).

    The correction is an SVD in float64 for each weight and step, rounded to the parameter's own dtype. ``plan`` says
    what is done with each parameter. Reference: arXiv:2605.06258, Gram-only step.

    Example:
        >>> layer = torch.nn.Linear(3, 2).double()
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> print(GramOnly(optimizer, keep="preserving", model=layer))
        GramOnly(SGD, keep='preserving', method='procrustes', others='pass')
          weight (2x3): preserving part
          bias (2): full step, no matrix
        >>> before = layer.weight.detach().T @ layer.weight.detach()
        >>> layer(torch.ones(4, 3).double()).square().sum().backward()
        >>> optimizer.step()
        >>> bool(((layer.weight.T @ layer.weight) - before).abs().max() < 1e-14)
        True
    """

    def __init__(
        self,
        optimizer: object,
        *,
        keep: Keep = "altering",
        method: Method = "procrustes",
        others: Literal["pass", "freeze"] = "pass",
        model: nn.Module | None = None,
    ) -> None:
        inner = inner_optimizer(optimizer)
        if inner is None:
            raise UnsupportedError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Take each by itself."
            )
        _check_option("keep", keep, ("altering", "preserving"))
        _check_option("method", method, ("procrustes", "sylvester"))
        _check_option("others", others, ("pass", "freeze"))
        self.optimizer = inner
        self.keep, self.method, self.others = keep, method, others
        self._forms, self._names = _known_forms(model)
        self._before: list[tuple[Tensor, Tensor]] = []
        for parameter in self._parameters():
            _check(parameter)
        self._hooks = [inner.register_step_pre_hook(self._note), inner.register_step_post_hook(self._correct)]

    def __enter__(self) -> "GramOnly":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """The optimiser takes whole steps again."""
        for hook in self._hooks:
            hook.remove()

    @property
    def plan(self) -> dict[str, str]:
        """What is done with each parameter: its name (or group and place), and its part of the step."""
        taken = {"pass": "full step", "freeze": "no step"}[self.others]
        plan = {}
        for group, members in enumerate(self.optimizer.param_groups):
            for place, parameter in enumerate(members["params"]):
                name = self._names.get(parameter, f"group {group}, parameter {place}")
                shape = "x".join(map(str, parameter.shape)) or "scalar"
                form = self._form(parameter)
                plan[f"{name} ({shape})"] = f"{taken}, no matrix" if form is None else f"{self.keep} part"
        return plan

    def _note(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._before = [(parameter, parameter.detach().clone()) for parameter in self._parameters()]

    @torch.no_grad()
    def _correct(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        for parameter, old in self._before:
            if not torch.equal(parameter, old):  # an unmoved weight stays as it is to the last bit
                parameter.copy_(self._part(parameter, old))
        self._before = []

    def _part(self, parameter: Tensor, old: Tensor) -> Tensor:
        form = self._form(parameter)
        if form is None:
            return old if self.others == "freeze" else parameter
        w1, w2 = form.matrices(old), form.matrices(parameter)
        if not bool(torch.isfinite(w2).all()):
            name = self._names.get(parameter, f"of shape {tuple(parameter.shape)}")
            raise InputError(
                f"the step of parameter {name} must be finite, but the optimiser wrote NaN or infinity into it. "
                "The run has diverged: lower the learning rate or clip gradients."
            )
        if self.method == "procrustes":
            new = gram_only_step(w1, w2, self.keep)
        else:
            new = w1 + getattr(split_step(w1, w2 - w1), self.keep)
        return form.tensor(new, parameter)

    def _form(self, parameter: Tensor) -> MatrixForm | None:
        if parameter in self._names:
            return self._forms.get(parameter)
        return MatrixForm.plain(parameter.shape) if parameter.dim() >= 2 and parameter.numel() else None

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def __repr__(self) -> str:
        inner = type(self.optimizer).__name__
        head = f"GramOnly({inner}, keep={self.keep!r}, method={self.method!r}, others={self.others!r})"
        return "\n".join([head, *(f"  {name}: {part}" for name, part in self.plan.items())])


def _known_forms(model: nn.Module | None) -> tuple[dict[Tensor, MatrixForm], dict[Tensor, str]]:
    """Matrix forms and names by parameter."""
    if model is None:
        return {}, {}
    parameters = named_parameters(unwrap(model))
    forms: dict[Tensor, MatrixForm] = {parameters[use.parameter]: use.form for use in weight_forms(model).values()}
    return forms, {parameter: name for name, parameter in parameters.items()}


def _check(parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise InputError("parameters must have a shape, but one is lazy and not initialised. Call model(x) once first.")
    check_plain(parameter, f"a parameter of shape {tuple(parameter.shape)}")
    if type(parameter).__name__ == "DTensor" or hasattr(parameter, "_local_tensor"):
        raise UnsupportedError(
            "GramOnly needs whole weight matrices, but a parameter is a DTensor (sharded). Use it with data "
            "parallelism (DDP), where each process holds the whole weight."
        )


def _check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} must be one of {allowed}, got {value!r}.")
