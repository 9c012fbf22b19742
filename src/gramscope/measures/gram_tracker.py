"""Did the Gram matrix learn the virtual covariance? Both changes, accumulated over the steps really taken."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.base.agreement import cosine
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.user_warnings import undefined, warn
from gramscope.capture.network import named_parameters, unwrap
from gramscope.hierarchy.optimizer_step import ParamGroup, inner_optimizer
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.weight_matrices import MatrixForm, weight_forms

NO_CHANGE = "one of the two has not changed at all"


@dataclass(frozen=True, eq=False, repr=False)
class GramChange(Result, shown=("cosine", "gradient_cosine", "second_order", "steps")):
    """What became of the Gram matrix of one weight over ``steps`` steps, (g, i, i) each.

    ``gram`` is ``W_TᵀW_T - W_0ᵀW_0``. ``virtual`` is ``Σ_t 2 sym(W_tᵀ D_t)``, D_t the step really taken: to first order
    in the step the change of the virtual covariance. ``gradient`` is the part of plain gradient descent,
    ``-Σ_t η_t 2 sym(W_tᵀ ∇_W L)``, by the Feature Learning Equation ``-Σ_t η_t 2 sym((∇_H L)ᵀ H)``. ``decay`` is the
    nominal part of weight decay, ``-Σ_t 2 η_t λ W_tᵀW_t``. For SGD without momentum ``virtual = gradient + decay``;
    with momentum or Adam the three differ, and ``gradient_cosine`` says by how much.
    """

    name: str
    steps: int
    gram: Float[Tensor, "g i i"]
    virtual: Float[Tensor, "g i i"]
    gradient: Float[Tensor, "g i i"]
    decay: Float[Tensor, "g i i"]

    @property
    def cosine(self) -> float:
        """Cosine of ``gram`` and ``virtual``: 1 where the steps are small enough for first order."""
        return cosine(self.gram, self.virtual, f"the cosine of Gram changes of {self.name}", NO_CHANGE)

    @property
    def gradient_cosine(self) -> float:
        """Cosine of ``gram`` and ``gradient``: how far the optimiser bent what the features asked for."""
        return cosine(self.gram, self.gradient, f"the cosine of Gram and gradient changes of {self.name}", NO_CHANGE)

    @property
    def second_order(self) -> float:
        """``|gram - virtual| / |gram|``: share of the terms ``Σ_t D_tᵀD_t`` that first order leaves out."""
        size = float(self.gram.norm())
        if size == 0:
            return undefined(f"the second-order share of {self.name}", "its Gram matrix has not changed")
        return float((self.gram - self.virtual).norm()) / size


@dataclass(frozen=True, eq=False, repr=False)
class GramChanges(ByWeight[GramChange]):
    """:class:`GramChange` by weight name; ``left_out`` names every other parameter and says why."""


class GramTracker:
    """Watches an optimiser and sums up, for every weight, the changes of its Gram matrix and its virtual covariance.

    "The weight Gram matrix learns the virtual covariance" is a statement about changes, and about the step really
    taken: momentum, weight decay and Adam change the step. So the parameters are read before and after each
    ``optimizer.step()``, and their gradients with them; nothing is written. Use it as a context manager, or call
    :meth:`remove` at the end. Memory: one copy of the weight and four matrices (i, i) in float64 for each weight. For
    optimisers that evaluate a closure several times in one step (L-BFGS) ``gradient`` holds the last gradient alone.

    Args:
        model: the model; its modules tell which parameters are matrices.
        optimizer: the torch optimiser that moves it, or a wrapper of one (accelerate's), or several.
        weights: glob, or globs, of parameter names.

    Reference: arXiv:2605.06258, the statement about changes.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> with GramTracker(model, optimizer) as tracker:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         (model(x) - y).square().mean().backward()
        ...         optimizer.step()
        >>> changes = tracker.compute()
        >>> changes["0.weight"].steps, changes["0.weight"].cosine > 0.999
        (10, True)
    """

    def __init__(self, model: nn.Module, optimizer: object, weights: str | Sequence[str] = "*") -> None:
        model = unwrap(model)
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [inner for one in given if (inner := inner_optimizer(one)) is not None]
        if len(optimizers) < len(given):
            raise InputError(f"optimizer must be a torch.optim.Optimizer, or several of them, got {optimizer!r}.")
        named = named_parameters(model)
        moved = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        forms = weight_forms(model).chosen(weights)
        self.left_out = dict(forms.left_out)
        self._weights: dict[str, _Watched] = {}
        for name, use in forms.items():
            if id(named[name]) in moved:
                self._weights[name] = _Watched(name, named[name], use.form)
            else:
                self.left_out[name] = "not among the parameters of the optimiser"
        if not self._weights:
            raise InputError(
                "the optimiser must move a weight matrix of the model, but it holds none of them. Make the optimiser "
                f"from this model's own parameters. Left out: {self.left_out}."
            )
        self._handles = [one.register_step_pre_hook(self._before) for one in optimizers]
        self._handles += [one.register_step_post_hook(self._after) for one in optimizers]

    def __enter__(self) -> "GramTracker":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"GramTracker({len(self._weights)} weights, {max(w.steps for w in self._weights.values())} steps)"

    def remove(self) -> None:
        """Stop watching; what was accumulated stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def compute(self) -> GramChanges:
        """The changes so far; warns where something but the optimiser has written into a weight."""
        found = {name: weight.change() for name, weight in self._weights.items()}
        changed = [name for name, weight in self._weights.items() if weight.outside]
        if changed:
            warn(
                f"{', '.join(changed)} changed between optimiser steps (weights loaded, clipped or averaged?); "
                "such changes are in .gram but in none of the sums over steps."
            )
        return GramChanges(found, self.left_out)

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        held = _members(optimizer)
        for weight in self._weights.values():
            if id(weight.parameter) in held:
                weight.begin()

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        held = _members(optimizer)
        # GradScaler leaves it to fused optimisers to skip a step with infinite gradients, and tells them so here.
        infinite = getattr(optimizer, "found_inf", None)
        skipped = infinite is not None and bool(infinite)
        for weight in self._weights.values():
            if id(weight.parameter) in held and not skipped:
                weight.end(held[id(weight.parameter)])


class _Watched:
    """One weight and its sums."""

    def __init__(self, name: str, parameter: Tensor, form: MatrixForm) -> None:
        self.name, self.parameter, self.form = name, parameter, form
        self.last = parameter.detach().clone()
        start = form.matrices(parameter)
        self.start = start.mT @ start
        self.virtual, self.gradient, self.decay = (torch.zeros_like(self.start) for _ in range(3))
        self.steps, self.outside = 0, False

    def begin(self) -> None:
        if not torch.equal(self.last, self.parameter):
            self.outside = True
            self.last = self.parameter.detach().clone()

    def end(self, group: ParamGroup) -> None:
        # The gradient is read after the step: closures have filled it in by then, fused optimisers have unscaled it.
        weight, gradient = self.form.matrices(self.last), self.parameter.grad
        now = self.parameter.detach().clone()
        self.virtual += _twice_sym(weight.mT @ (self.form.matrices(now) - weight))
        if gradient is not None:
            rate = float(group.get("lr", 0.0)) * (-1 if group.get("maximize") else 1)
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            self.gradient -= rate * _twice_sym(weight.mT @ self.form.matrices(dense))
            decay = float(group.get("weight_decay") or 0.0) * float(group.get("lr", 0.0))
            self.decay -= 2 * decay * (weight.mT @ weight)
        self.last, self.steps = now, self.steps + 1

    def change(self) -> GramChange:
        weight = self.form.matrices(self.parameter)
        if not torch.equal(self.last, self.parameter):
            self.outside = True
        return GramChange(
            self.name, self.steps, weight.mT @ weight - self.start, self.virtual.clone(), self.gradient.clone(),
            self.decay.clone(),
        )  # fmt: skip


def gram_change_sizes(
    weight: Float[Tensor, "g o i"], change: Float[Tensor, "g o i"], pulled: Float[Tensor, "g o i"]
) -> tuple[float, float, float]:
    """``|ΔGram|``, ``|ΔVC|`` and ``⟨ΔGram, ΔVC⟩`` of one step, ``ΔGram = W'ᵀW' - WᵀW`` and ``ΔVC = -2 sym(Wᵀ D g)``.

    ``change`` is ``W' - W``, ``pulled`` is ``D g``. Both lie in the span of the rows of the three, so that a wide
    weight is measured in an orthonormal basis of it, and no (i, i) matrix is made. (Traces of products of (o, o)
    matrices would do without a basis, but cancel where a step turns the weight: half of the digits would be lost.)
    """
    rows = torch.cat([weight, change, pulled], 1)
    if rows.shape[1] < rows.shape[2]:
        rows = torch.linalg.qr(rows.mT, mode="r").R.mT
    w, d, p = rows.split(weight.shape[1], 1)
    gram = _twice_sym(w.mT @ d) + d.mT @ d
    virtual = -_twice_sym(w.mT @ p)
    return float(gram.norm()), float(virtual.norm()), float((gram * virtual).sum())


def _twice_sym(matrix: Tensor) -> Tensor:
    return matrix + matrix.mT


def _members(optimizer: Optimizer) -> dict[int, ParamGroup]:
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}
