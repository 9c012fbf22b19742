"""Which components of a task the network cannot learn from where it stands."""

from dataclasses import dataclass, field
from typing import Unpack

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from gramscope.base.checks import check_count, check_finite
from gramscope.base.errors import InputError
from gramscope.base.results import TableResult
from gramscope.base.rng import child_seed, gaussian, generator
from gramscope.base.rounding import Rounding, singular_floor
from gramscope.propagators.global_ntk import GlobalNTK, GlobalOptions
from gramscope.tasks.sequences import SequenceTask


@dataclass(frozen=True, eq=False, repr=False)
class BlockedComponents(
    TableResult, shown=("blocked_share", "share", "relative"), columns=("share", "quotient", "relative")
):
    """The components of a task's targets, largest first, and how fast gradient descent sees each of them.

    ``share`` of the targets' square; ``quotient`` ``mᵀ A m`` of the unit component m under the output kernel A;
    ``relative`` the same over the mean eigenvalue of A on the outputs that count, whose standard error is
    ``mean_error``. A component with ``relative`` below 1 is slower than a random direction: it is blocked.
    """

    share: Float64[Tensor, " k"]
    quotient: Float64[Tensor, " k"] = field(repr=False)
    relative: Float64[Tensor, " k"]
    mean: float
    mean_error: float

    @property
    def blocked_share(self) -> float:
        """The share of the targets in components that are slower than a random direction."""
        return float(self.share[self.relative < 1].sum())


@torch.no_grad()
def blocked_components(
    model: nn.Module,
    task: SequenceTask,
    k: int | None = None,
    *,
    products: int = 32,
    seed: int = 0,
    **options: Unpack[GlobalOptions],
) -> BlockedComponents:
    """How fast each component of a task can be learnt from the network's present dynamics.

    The targets, where they count, are ``Y = Σ_j σ_j u_j v_jᵀ`` over (trial, time) and outputs; component j is the unit
    vector ``m_j = u_j ⊗ v_j`` of outputs. Under gradient flow on ``½|f - Y|²`` it starts to be learnt at the rate
    ``m_jᵀ A m_j`` with the output kernel ``A = C P K P* C*``. At initialisation this is how the initial dynamics decide
    what can be learnt: a direction that must be held through a delay, which the activity has forgotten, has a small
    quotient.

    Args:
        model: takes ``task.x`` (trial, time, i) and gives outputs (trial, time, o); it is left as it was.
        task: of :mod:`gramscope.tasks`.
        k: number of components; None: all.
        products: random vectors that estimate the mean eigenvalue ``tr(A)/M`` of the M outputs that count.
        seed: of these.
        options: those of :class:`GlobalNTK`.

    Reference: arXiv:2605.08746 ("model dynamics at initialization bias the NTK, restricting learning and preventing
    task components from being learned effectively").

    Example:
        >>> from gramscope.tasks import memory_pro, recurrent
        >>> task = memory_pro(6, fixation=3, stimulus=4, delay=20, response=4)
        >>> found = blocked_components(recurrent("rnn", 3, 16, 3), task)
        >>> bool(found.relative[0] > 1), bool((found.relative[1:] < 1).all())     # fixation; the angle
        (True, True)
    """
    check_count(products, "products", least=3)
    modes, shares = components(task, k)
    x = task.x.to(next((p for p in model.parameters()), task.x))
    g = GlobalNTK(model, x, **options)
    if g.C.rows.size != task.y.numel():
        raise InputError(
            f"the model must give outputs like the targets, {tuple(task.y.shape)}, got {g.C.rows!r}. Read out every "
            "step."
        )
    slopes = g.jacobian.T @ (g.C.T @ modes.to(g.C.dtype).to(g.C.device))
    quotient = slopes.double().square().sum(0).cpu()  # as a square it is never below zero, however small
    mean, error = _mean_eigenvalue(g, task.mask[:, :, None].expand_as(task.y), products, seed)
    return BlockedComponents(shares, quotient, quotient / mean, mean, error)


def components(task: SequenceTask, k: int | None) -> tuple[Float64[Tensor, "M k"], Float64[Tensor, " k"]]:
    """The unit components of a task's targets, as columns, and their shares of the targets' square."""
    check_finite(task.y, "the targets", "Clean the data first.")
    y = task.y * task.mask[..., None].to(task.y)
    flat = y.double().flatten(0, 1)
    left, sizes, right = torch.linalg.svd(flat, full_matrices=False)
    keep = int((sizes > singular_floor(flat, Rounding.of(y))).sum())
    if keep == 0:
        raise InputError("the targets must not be all zero where they count: they have no components.")
    if k is not None:
        keep = check_count(k, "k", most=keep, why="the rank of the targets")
    modes = torch.stack([torch.outer(left[:, j], right[j]).flatten() for j in range(keep)], dim=1)
    return modes, (sizes.square() / sizes.square().sum())[:keep]


def _mean_eigenvalue(g: GlobalNTK, counted: Tensor, products: int, seed: int) -> tuple[float, float]:
    """``tr(A)/M`` over the outputs that count: ``tr A = E|C P J w|²``, and its standard error."""
    rng = generator(child_seed(seed, "mean eigenvalue"))
    w = gaussian(g.jacobian.cols.size, products, rng=rng, dtype=g.jacobian.dtype, device=g.jacobian.device)
    moved = (g.C @ (g.jacobian @ w)).double().cpu() * counted.reshape(-1, 1).cpu()
    means = moved.square().sum(0) / int(counted.sum())
    return float(means.mean()), float(means.std() / products**0.5)
