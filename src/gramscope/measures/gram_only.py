"""A step of a weight in two parts, one of which changes the Gram matrix ``WᵀW``; an optimiser that takes one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gramscope.base.checks import check_choice, check_finite, check_plain, check_tensor
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.results import Result
from gramscope.base.rounding import EPS64, Rounding, singular_floor
from gramscope.capture.network import named_parameters, unwrap
from gramscope.hierarchy.optimizer_step import inner_optimizer
from gramscope.measures.rows import check_size
from gramscope.measures.weight_matrices import MatrixForm, weight_forms

Method = Literal["sylvester", "procrustes"]
Keep = Literal["altering", "preserving"]


@dataclass(frozen=True, eq=False, repr=False)
class StepSplit(Result, shown=("share", "altering")):
    """``step = altering + preserving``, (..., m, d) each; by Sylvester the two are orthogonal (Frobenius)."""

    altering: Float[Tensor, "*g m d"]
    preserving: Float[Tensor, "*g m d"]

    @property
    def share(self) -> float:
        """Share of the squared norm of the step that alters the Gram matrix; 0 for a zero step."""
        altering, preserving = (float(part.square().sum()) for part in (self.altering, self.preserving))
        return altering / (altering + preserving) if altering + preserving else 0.0


def split_step(weight: Tensor, step: Tensor, method: Method = "sylvester") -> StepSplit:
    """The parts of a step D that alter and that preserve the Gram matrix of W; they sum to D.

    "sylvester", for small steps: the preserving part is ``A W`` with A antisymmetric and
    ``S A + A S = D Wᵀ - W Dᵀ``, ``S = W Wᵀ``: the projection of D on the directions in which ``WᵀW`` does not change.
    Solved in the singular basis ``W = U Σ Vᵀ``, ``X = Uᵀ D V``, where nothing is divided by a small number:
    ``Uᵀ(AW)V = (X_ij σ_j² - X_ji σ_i σ_j) / (σ_i² + σ_j²)``; what D adds outside the columns of W turns them, too.

    "procrustes", for finite steps: the altering part leads to ``Q (W + D)``, which has exactly the Gram matrix of
    ``W + D`` (see :func:`gram_only_step`); the rest is the turn from there. Both agree to first order in D.

    Shapes: ``weight`` and ``step`` (..., m, d), wide, tall or rank-deficient, any floating dtype; float64 comes back.
    Where W has no extent beyond its rounding (a zero weight, the null space of its rows) the step alters. Reference:
    arXiv:2605.06258, Gram-altering and Gram-preserving parts.

    Example:
        >>> W = torch.eye(2)
        >>> split = split_step(W, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        >>> split.altering.tolist(), split.preserving.tolist()
        ([[1.0, 1.0], [1.0, 1.0]], [[0.0, 1.0], [-1.0, 0.0]])
    """
    w, d = _weight_and(weight, step, "step")
    check_choice(method, "method", get_args(Method))
    if method == "procrustes":
        altering = gram_only_step(w, w + d) - w
        return StepSplit(altering, d - altering)
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    keep = s > torch.maximum(max(w.shape[-2:]) * EPS64 * s[..., :1], singular_floor(w, Rounding.of(weight)))
    s = torch.where(keep, s, 0.0)
    inside = u.mT @ d @ vt.mT  # X
    rows, cols = s[..., :, None], s[..., None, :]
    weights = rows.square() + cols.square()
    turned = (inside * cols.square() - inside.mT * rows * cols) / torch.where(weights > 0, weights, 1.0)
    # Along left singular vectors of σ = 0, and outside the columns of W, only Dᵀ meets W: the rule above with σ_i = 0.
    outside = (d @ vt.mT - u @ inside) * keep[..., None, :]
    preserving = (u @ turned + outside) @ vt
    return StepSplit(d - preserving, preserving)


def gram_only_step(before: Tensor, after: Tensor, keep: Keep = "altering") -> Float[Tensor, "*g m d"]:
    """The weight after a finite step ``W₁ → W₂`` of which only one part was taken, exactly.

    With Q the orthogonal factor of ``W₁W₂ᵀ`` (Procrustes: Q turns W₂ as near to W₁ as it can): "altering" gives
    ``Q W₂``, whose Gram matrix is that of W₂ to rounding; "preserving" gives ``Qᵀ W₁``, whose Gram matrix is that of
    W₁. Where Q is not determined (rank-deficient weights) the turn nearest to the identity is taken, so no step gives
    no turn.

    Shapes: (..., m, d) both; the SVD is of at most min(m, 2d) rows. Float64 comes back. Newton-Schulz iterations are
    not used: ten of them err by more than the step itself. Reference: arXiv:2605.06258, Gram-only step.

    Example:
        >>> W, turn = torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> gram_only_step(W, turn @ (2 * W)).tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    check_choice(keep, "keep", get_args(Keep))
    w1, w2 = _weight_and(before, after, "after")
    basis = None
    if w1.shape[-2] > 2 * w1.shape[-1]:
        # Q moves nothing outside the span of the columns of both, so a tall weight is turned within that span.
        basis = torch.linalg.qr(torch.cat([w1, w2], dim=-1))[0]
        w1, w2 = basis.mT @ w1, basis.mT @ w2
    rounding = max(Rounding.of(before), Rounding.of(after), key=lambda r: r.eps)
    q = _nearest_turn(_without_rounding(w1, rounding) @ _without_rounding(w2, rounding).mT)
    result = q @ w2 if keep == "altering" else q.mT @ w1
    return result if basis is None else basis @ result


def _without_rounding(w: Float[Tensor, "*g m d"], rounding: Rounding) -> Float[Tensor, "*g m d"]:
    """W without the directions that are rounding: how they turn means nothing."""
    floor = singular_floor(w, rounding)
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    shifted = gram - floor.square()[..., None] * torch.eye(gram.shape[-1], dtype=w.dtype, device=w.device)
    if bool((torch.linalg.cholesky_ex(shifted).info == 0).all()):  # all are above the floor, at a tenth of the cost
        return w
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    return (u * torch.where(s > floor, s, 0.0)[..., None, :]) @ vt


def _nearest_turn(product: Float[Tensor, "*g m m"]) -> Float[Tensor, "*g m m"]:
    """The orthogonal polar factor; on null spaces the orthogonal map nearest to the identity."""
    left, s, right = torch.linalg.svd(product)
    keep = s > s.shape[-1] * EPS64 * s[..., :1]
    if bool(keep.all()):
        return left @ right
    size = product.shape[-1]
    stacks = left.reshape(-1, size, size), right.reshape(-1, size, size), keep.reshape(-1, size).sum(1).tolist()
    return torch.stack([_complete(*one) for one in zip(*stacks, strict=True)]).reshape(product.shape)


def _complete(left: Float[Tensor, "m m"], right: Float[Tensor, "m m"], rank: int) -> Float[Tensor, "m m"]:
    free_left, free_right = left[:, rank:], right[rank:]
    p, _, r = torch.linalg.svd(free_left.mT @ free_right.mT)
    return left[:, :rank] @ right[:rank] + free_left @ (p @ r) @ free_right


def _weight_and(weight: Tensor, other: Tensor, what: str) -> tuple[Tensor, Tensor]:
    if (
        check_tensor(weight, "weight").shape != check_tensor(other, what).shape
        or weight.dim() < 2
        or weight.numel() == 0
    ):
        raise InputError(
            f"weight and {what} must have one shape (m, d) with m, d > 0, got {tuple(weight.shape)} and "
            f"{tuple(other.shape)}. A convolution's weight is (out, in · kernel): weight.flatten(1)."
        )
    for tensor, name in ((weight, "weight"), (other, what)):
        check_finite(tensor, name, "The run has diverged: load an earlier checkpoint.")
    check_size(weight, "weight")
    return weight.detach().double(), other.detach().double()


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
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. "
                "Wrap each optimizer by itself."
            )
        check_choice(keep, "keep", get_args(Keep))
        check_choice(method, "method", get_args(Method))
        check_choice(others, "others", ("pass", "freeze"))
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
