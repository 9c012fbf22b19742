"""Is the collapse of learning onto few directions the task's, or the network's own?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.checks import check_count, check_finite, check_tensor, shape_or_type
from gramscope.base.effective_rank import participation_ratio_of
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.results import Result
from gramscope.base.rng import child_seed, gaussian, generator
from gramscope.linalg import LinearOperator
from gramscope.linalg.intervals import jackknife_error
from gramscope.propagators.global_ntk import GlobalNTK, GlobalOptions
from gramscope.propagators.measures import ENTRIES, EXACT, partial_trace


@dataclass(frozen=True, repr=False)
class CollapseBeyondTask(Result, shown=("kernel", "task", "ratio", "noise_kernel", "noise_task", "noise_ratio")):
    """Participation ratios over time (or trials, or both), of operators on the states and of the task's own statistics.

    ``kernel`` of NTK_S = P K P*, ``parameters`` of K, ``propagator`` of P P*, ``states`` of the activity, ``inputs``
    and ``targets`` of the data, ``task`` of both together. ``noise_kernel`` and ``noise_task`` are those of the same
    network driven by white noise of the inputs' size: a task without any low-dimensional structure. The errors of
    ``kernel`` and ``noise_kernel`` are standard errors, 0 where exact.
    """

    kernel: float
    parameters: float
    propagator: float
    states: float
    inputs: float
    targets: float | None
    task: float
    noise_kernel: float
    noise_task: float
    kernel_error: float
    noise_kernel_error: float

    @property
    def ratio(self) -> float:
        """``kernel / task``: below 1 the states can learn in fewer directions than the task has."""
        return self.kernel / self.task

    @property
    def noise_ratio(self) -> float:
        """The same under white noise: far below 1 where the network collapses whatever the task."""
        return self.noise_kernel / self.noise_task


@torch.no_grad()
def collapse_beyond_task(
    model: nn.Module,
    x: Float[Tensor, "trial time i"],
    y: Float[Tensor, "trial time o"] | None = None,
    h0: ModelInput = None,
    *,
    over: Sequence[str] = ("trial", "site", "unit"),
    products: int | None = None,
    seed: int = 0,
    **options: Unpack[GlobalOptions],
) -> CollapseBeyondTask:
    """Effective rank of the global kernel beside that of the task's own input-output statistics, and of white noise.

    All are matrices over time (or trials, or both), the other axes traced out: ``B_ab = Σ_i A_{(i,a),(i,b)}`` of an
    operator, and ``Σ_i z_{i,a} z_{i,b}`` of signals z; of the task, inputs and targets scaled to equal size. Counted by
    ``tr(B)²/tr(B²)``.

    Args:
        model: a recurrent module or a cell, whose states have axes (trial, time, site, unit).
        x: inputs (trial, time, ...), as the model takes them with trials first (``batch_first=True``).
        y: targets (trial, time, ...); None: the inputs alone are the task.
        h0: as in :class:`GlobalNTK`; needed for a cell.
        over: the axes to trace out: "site" and "unit", and "trial", "time" or neither.
        products: random vectors for each operator, ``B = E[VᵀV]`` with ``V = P J w``; None: exact, for up to 4,096
            states.
        seed: of these and of the noise.
        options: those of :class:`GlobalNTK`.

    Reference: arXiv:2507.06381 ("the collapse is a result of the network structure, over and above the nature of the
    underlying task").

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(4, 12, 2)
        >>> found = collapse_beyond_task(nn.GRU(2, 16, batch_first=True), x, x.cumsum(1))
        >>> found.noise_ratio < 0.5 < 2 < found.propagator
        True
    """
    keep = _checked(model, x, y, over)
    if products is not None:
        check_count(products, "products", least=3)
    task = [x] if y is None else [x, y]
    g = GlobalNTK(model, x, h0, **options)
    kernel, error = _ratio(g, "kernel", keep, products, seed)
    rng = generator(child_seed(seed, "white noise"))
    drawn = gaussian(x.numel(), 1, rng=rng, dtype=x.dtype, device=x.device)
    noise = drawn.reshape(x.shape) * x.double().square().mean().sqrt().to(x.dtype)
    noisy = GlobalNTK(model, noise, h0, **options)
    noise_kernel, noise_error = _ratio(noisy, "kernel", keep, products, seed)
    names = g.axes.names
    states = g.axes.unflatten(g.values)
    moved = torch.stack([states.select(names.index("site"), i) for i in range(g.axes["site"])], dim=-1)
    return CollapseBeyondTask(
        kernel=kernel,
        parameters=_ratio(g, "parameters", keep, products, seed)[0],
        propagator=_ratio(g, "propagator", keep, products, seed)[0],
        states=participation_ratio_of(_gram(moved, keep), "the activity"),
        inputs=participation_ratio_of(_gram(x, keep), "the input"),
        targets=None if y is None else participation_ratio_of(_gram(y, keep), "the target"),
        task=participation_ratio_of(_joint(task, keep), "the task"),
        noise_kernel=noise_kernel,
        noise_task=participation_ratio_of(_gram(noise, keep), "the noise"),
        kernel_error=error,
        noise_kernel_error=noise_error,
    )  # fmt: skip


def _checked(model: nn.Module, x: Tensor, y: Tensor | None, over: Sequence[str]) -> list[str]:
    """The axes that are kept."""
    kept = [name for name in ("trial", "time") if name not in over]
    if isinstance(over, str) or not kept or {*over, *kept} != {"trial", "time", "site", "unit"}:
        raise InputError(
            'over must name the axes to trace out, "site" and "unit" and of "trial" and "time" one or none, got '
            f"{over!r}."
        )
    if not isinstance(x, Tensor) or x.dim() < 3:
        raise InputError(
            f"x must be a tensor with axes (trial, time, ...), got {shape_or_type(x)}. Of a task, pass task.x."
        )
    if getattr(model, "batch_first", True) is False:
        raise InputError(
            "the model must take trials first, but it has batch_first=False. Build it with batch_first=True."
        )
    for name, given in (("x", x), ("y", y)):
        if given is not None:
            check_finite(check_tensor(given, name), name, "Clean the data first.")
            if given.dim() < 3 or given.shape[:2] != x.shape[:2]:
                raise InputError(
                    f"{name} must have axes (trial, time, ...) like x, {tuple(x.shape[:2])}, got {tuple(given.shape)}."
                )
    return kept


def _gram(z: Float[Tensor, "trial time ..."], keep: list[str]) -> Float64[Tensor, "k k"]:
    """``Σ_i z_{i,a} z_{i,b}`` over the axes kept, of length 1 in all."""
    z = z.double().flatten(2)
    rows = {("time",): z.transpose(0, 1), ("trial",): z, ("trial", "time"): z.flatten(0, 1)}[tuple(keep)]
    flat = rows.reshape(len(rows), -1)
    return flat @ flat.mT


def _joint(signals: list[Tensor], keep: list[str]) -> Float64[Tensor, "k k"]:
    grams = [_gram(signal, keep) for signal in signals]
    return torch.stack([gram / gram.trace().clamp_min(torch.finfo(torch.float64).tiny) for gram in grams]).sum(0)


def _ratio(g: GlobalNTK, which: str, keep: list[str], products: int | None, seed: int) -> tuple[float, float]:
    """The participation ratio of one operator over the axes kept, and its standard error."""
    axes = g.axes
    if not {"trial", "time", "site", "unit"} <= set(axes):
        raise InputError(
            "the model must be a recurrent module or a cell, with states over trial, time, site and unit, got "
            f"{axes!r}. Pass the recurrent module in it with the inputs that it receives."
        )
    if products is None:
        if axes.size > EXACT:
            raise InputError(
                f"{axes.size:,} states are too many for an exact trace, which takes up to {EXACT:,}. Pass products=8."
            )
        exact = {"kernel": g.operator, "parameters": g.K, "propagator": g.P @ g.P.T}[which]
        matrix = partial_trace(exact, [name for name in axes if name not in keep]).matrix
        return participation_ratio_of(matrix, "the operator"), 0.0
    root: LinearOperator = {"kernel": g.jacobian, "parameters": g.J, "propagator": g.P}[which]
    grams = _sampled(root, axes, keep, products, child_seed(seed, which))
    total = grams.sum(0)
    value = participation_ratio_of(total, "the operator")
    others = torch.tensor([participation_ratio_of(total - gram, "the operator") for gram in grams], device="cpu")
    return value, float(jackknife_error(others))


def _sampled(
    root: LinearOperator, axes: Axes, keep: list[str], products: int, seed: int
) -> Float64[Tensor, "product k k"]:
    """``VᵀV`` of ``V = root w`` with Gaussian w, the axes kept in front: unbiased for the traced ``root rootᵀ``."""
    rng = generator(seed)
    front = [axes.names.index(name) for name in keep]
    rest = [place for place in range(len(axes)) if place not in front]
    few = max(1, ENTRIES // max(axes.size, root.cols.size))
    grams = []
    for start in range(0, products, few):
        k = min(few, products - start)
        w = gaussian(root.cols.size, k, rng=rng, dtype=root.dtype, device=root.device)
        for column in (root @ w).mT:
            rows = axes.unflatten(column).permute(*front, *rest).flatten(len(front)).flatten(0, -2).double()
            grams.append((rows @ rows.mT).cpu())
    return torch.stack(grams)
