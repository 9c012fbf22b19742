"""A regulariser that asks for target linearity: differentiable, streaming, for any training loop.

``1 - TL_ρ``, where ``TL_ρ = tr(S_yh (S_hh + ρ s 1)⁻¹ S_hy) / tr(S_yy)`` is the target linearity of arXiv:2605.06258
with an offset and a ridge ρ, relative to the mean variance ``s = tr(S_hh) / p`` of a feature. At ρ = 0 it is
``target_linearity(features, targets, center=True)``. The ridge keeps the gradient finite where features are fewer than
directions.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_counts, check_finite, check_number, is_number, shape_or_type
from gramscope.base.class_labels import class_labels, one_hot
from gramscope.base.errors import InputError
from gramscope.base.nested import tensors_in
from gramscope.capture.activations import Layers, Visit, choose_layers
from gramscope.capture.network import unwrap
from gramscope.measures.layer_features import Reduce, RowReduction

Hook = Callable[[nn.Module, tuple[object, ...], object], None]
Moments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # means of h and y; S_hh, S_hy, tr S_yy


def linearity_penalty(
    features: Tensor, targets: Tensor, *, ridge: float = 1e-3, classes: int | None = None
) -> Float[Tensor, ""]:
    """``1 - TL_ρ`` of one batch, differentiable in the features: 0 where a linear map makes the targets of them.

    Args:
        features: H (n, ...), with a graph; axes after the first are flattened. Half precision is summed in float32.
        targets: class labels (n,), which become one-hot rows, or numbers (n,) or (n, c).
        ridge: ρ, relative to the mean variance of a feature; positive.
        classes: how many classes labels may have (else: the largest label plus one).

    Reference: arXiv:2605.06258, target linearity; the use as a regulariser is its "future work".

    Example:
        >>> H = torch.tensor([[0.0], [1.0], [2.0], [3.0]], requires_grad=True)
        >>> penalty = linearity_penalty(H, torch.tensor([0.0, 1.0, 2.0, 4.0]), ridge=1e-9)
        >>> round(float(penalty.detach()), 6)
        0.034286
        >>> penalty.backward(); tuple(H.grad.shape)
        (4, 1)
    """
    check_number(ridge, "ridge", above=0.0, hint="At 0 the penalty of fewer examples than features is flat.")
    h, y = _paired(features, targets, classes)
    return _penalty(_moments(h, y), ridge, f"the batch of {len(h)} examples")


class LinearityPenalty(nn.Module):
    """:func:`linearity_penalty` over a stream of batches: moments of earlier batches, gradients through this one.

    With batches smaller than the features are many, the moments of one batch say little, and a batch of one class says
    nothing. Here the moments are a running average, ``S ← (1 - m) S + m S_batch``, and the gradient is that of the
    whole average divided by m, so that the strength of the penalty does not depend on m.

    Args:
        width: number of features p.
        targets: number of classes, or of target columns.
        momentum: m in (0, 1]; None gives all batches the same weight.
        ridge: ρ, see :func:`linearity_penalty`.

    The moments are buffers, so that they are saved with the model. In evaluation mode they stay as they are.

    Example:
        >>> penalty = LinearityPenalty(width=3, targets=2)
        >>> H = torch.randn(8, 3, requires_grad=True)
        >>> penalty(H, torch.arange(8) % 2).backward()
        >>> int(penalty.batches), H.grad is not None
        (1, True)
    """

    def __init__(self, width: int, targets: int, *, momentum: float | None = 0.1, ridge: float = 1e-3) -> None:
        super().__init__()
        check_number(ridge, "ridge", above=0.0, hint="At 0 the penalty of fewer examples than features is flat.")
        allowed = momentum is None or (is_number(momentum) and 0 < float(momentum) <= 1)
        if not allowed:
            raise InputError(f"momentum must lie in (0, 1], or be None for a plain average, got {momentum!r}.")
        check_counts(1, width=width, targets=targets)
        self.width, self.targets, self.momentum, self.ridge = width, targets, momentum, ridge
        self.register_buffer("examples", torch.zeros((), dtype=torch.float64, device="cpu"))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device="cpu"))
        shapes = {"mean_h": (width,), "mean_y": (targets,), "hh": (width, width), "hy": (width, targets), "yy": ()}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device="cpu"))
        self.examples: Tensor
        self.batches: Tensor
        self._names = tuple(shapes)

    def forward(self, features: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        h, y = _paired(features, targets, self.targets)
        if h.shape[1] != self.width or y.shape[1] != self.targets:
            raise InputError(
                f"features and targets must have {self.width} and {self.targets} columns, got {h.shape[1]} and "
                f"{y.shape[1]}. One LinearityPenalty belongs to one layer."
            )
        share = self._share(len(h))
        used = _merged(self._running(h), _moments(h, y), share)
        value = _penalty(used, self.ridge, f"the {int(self.batches) + 1} batches so far")
        if self.training:
            self._keep(used, len(h))
        # The batch has weight m in the average, so its gradient is m times that of the penalty of the data.
        return value + (1 / share - 1) * (value - value.detach())

    def target_linearity(self) -> float:
        """``TL_ρ`` of the running moments."""
        if int(self.batches) == 0:
            raise InputError("the penalty must have seen a batch first, but it has seen none. Call it in training.")
        with torch.no_grad():
            return 1 - float(_penalty(self._running(self.get_buffer("mean_h")), self.ridge, "the stream"))

    def extra_repr(self) -> str:
        return f"width={self.width}, targets={self.targets}, momentum={self.momentum}, ridge={self.ridge}"

    def _share(self, n: int) -> float:
        if int(self.batches) == 0:
            return 1.0
        return n / (float(self.examples) + n) if self.momentum is None else self.momentum

    def _running(self, like: Tensor) -> Moments:
        a, b, c, d, e = (self.get_buffer(name).to(like) for name in self._names)
        return a, b, c, d, e

    def _keep(self, used: Moments, n: int) -> None:
        for name, value in zip(self._names, used, strict=True):
            self._buffers[name] = value.detach()
        self.examples += n
        self.batches += 1


class LinearityRegularizer:
    """The penalty of chosen layers of a model, collected by hooks while your own loop runs the forward pass.

    ``with LinearityRegularizer(model, ["3", "5"], targets=10) as regularizer:`` then, after ``model(x)``, add
    ``strength * regularizer(y)`` to the loss. Each call uses the activations of the last forward pass, once; of a layer
    that runs several times in it, the last run; of a tuple of outputs, the first floating tensor.

    Args:
        model: any module.
        layers: names or globs of layers whose outputs become linear in the targets.
        targets: number of classes, or of target columns.
        reduce: how activations become rows, see :func:`gramscope.measures.features` ("unfold" has no targets here).
        momentum, ridge: see :class:`LinearityPenalty`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.randn(16, 4), torch.arange(16) % 2
        >>> with LinearityRegularizer(model, "1", targets=2) as regularizer:
        ...     loss = torch.nn.functional.cross_entropy(model(x), y) + 0.1 * regularizer(y)
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        *,
        targets: int,
        reduce: Reduce = "pool",
        momentum: float | None = 0.1,
        ridge: float = 1e-3,
    ) -> None:
        if reduce == "unfold":
            raise InputError('reduce must keep one row for each example; "unfold" does not. Use "pool" or "flatten".')
        self.model, self._reader = unwrap(model), RowReduction(reduce)
        self.penalties = nn.ModuleDict()
        self._targets, self._momentum, self._ridge = targets, momentum, ridge
        self._seen: dict[str, tuple[nn.Module, Tensor]] = {}
        LinearityPenalty(1, targets, momentum=momentum, ridge=ridge)  # refuses bad settings now
        chosen = choose_layers(self.model, layers)
        self._hooks = [module.register_forward_hook(self._hook(name)) for name, (module, _) in chosen.items()]

    def __call__(self, y: Tensor) -> Float[Tensor, ""]:
        """The mean penalty over the layers, of the last forward pass."""
        if not self._seen:
            raise InputError(
                "the model must have run in training mode with gradients on before the regulariser is called, and once "
                "for each call. Call model(x) first; in evaluation leave the regulariser out."
            )
        seen, self._seen = self._seen, {}
        found = []
        for name, (module, output) in seen.items():
            rows = self._reader(output, Visit(name, module, 1, len(y)))
            key = name.replace(".", "/") or "(model)"
            if key not in self.penalties:
                made = LinearityPenalty(rows.shape[1], self._targets, momentum=self._momentum, ridge=self._ridge)
                self.penalties[key] = made.to(rows.device)
            found.append(self.penalties[key](rows, y))
        return torch.stack(found).mean()

    def target_linearity(self) -> dict[str, float]:
        """``TL_ρ`` of the running moments, by layer."""
        named = {key.replace("/", "."): penalty for key, penalty in self.penalties.items()}
        return {name: p.target_linearity() for name, p in named.items() if isinstance(p, LinearityPenalty)}

    def remove(self) -> None:
        """Take the hooks off the model; it is as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], {}

    def __repr__(self) -> str:
        layers = ", ".join(f"{name}: {value:.4g}" for name, value in self.target_linearity().items())
        return f"LinearityRegularizer(target linearity {{{layers}}})"

    def __enter__(self) -> "LinearityRegularizer":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _hook(self, name: str) -> Hook:
        def after(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            floating = [t for t in tensors_in(output) if t.is_floating_point()]
            if module.training and torch.is_grad_enabled() and floating:
                self._seen[name] = module, floating[0]

        return after


def _paired(features: Tensor, targets: Tensor, classes: int | None) -> tuple[Tensor, Tensor]:
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.dim() < 1:
        raise InputError("features must be a floating tensor with examples on its first axis.")
    h = features.flatten(1) if features.dim() > 1 else features[:, None]
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    check_finite(h.detach(), "features", "Look for overflow (float16) or at the step where training diverged.")
    if not isinstance(targets, Tensor) or targets.dim() == 0 or len(targets) != len(h) or len(h) == 0:
        raise InputError(
            f"targets must have one row for each of the {len(h)} examples, at least one, got {shape_or_type(targets)}."
        )
    targets = targets.detach().to(h.device)
    if targets.is_floating_point():
        check_finite(targets, "targets", "Look at the data.")
        return h, (targets.flatten(1) if targets.dim() > 1 else targets[:, None]).to(h.dtype)
    return h, one_hot(class_labels(targets), classes).to(h.dtype)


def _moments(h: Float[Tensor, "n p"], y: Float[Tensor, "n c"]) -> Moments:
    mean_h, mean_y = h.mean(0), y.mean(0)
    h, y, n = h - mean_h, y - mean_y, len(h)
    return mean_h, mean_y, h.mT @ h / n, h.mT @ y / n, y.square().sum() / n


def _merged(running: Moments, batch: Moments, share: float) -> Moments:
    """Moments of a mixture: ``(1 - share)`` of the running ones, ``share`` of the batch."""
    rest = 1 - share
    h, y = batch[0] - running[0], batch[1] - running[1]
    return (
        running[0] + share * h,
        running[1] + share * y,
        rest * running[2] + share * batch[2] + rest * share * torch.outer(h, h),
        rest * running[3] + share * batch[3] + rest * share * torch.outer(h, y),
        rest * running[4] + share * batch[4] + rest * share * y.square().sum(),
    )


def _penalty(moments: Moments, ridge: float, what: str) -> Float[Tensor, ""]:
    _, _, hh, hy, yy = moments
    if float(yy) <= 0:
        raise InputError(
            f"targets must vary, but {what} hold one class (or one value), so that any features are linear in them. "
            "Shuffle the data, take larger batches, or use the streaming LinearityPenalty after a mixed batch."
        )
    size = hh.diagonal().mean()
    if float(size.detach()) == 0:
        return hh.sum() + 1.0  # features that do not vary say nothing; there is no direction to go
    eye = torch.eye(len(hh), dtype=hh.dtype, device=hh.device)
    factor = torch.linalg.cholesky(hh + ridge * size * eye)
    return 1 - torch.linalg.solve_triangular(factor, hy, upper=False).square().sum() / yy
