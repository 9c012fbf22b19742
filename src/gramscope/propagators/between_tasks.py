"""How far learning one task moves another: their objectives through P K P*, and the states that a step reaches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from gramscope.base.charts import heat_map
from gramscope.base.checks import check_count
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import TableResult
from gramscope.capture.network import loss_gradient
from gramscope.linalg import LinearOperator
from gramscope.linalg.intervals import jackknife_error
from gramscope.propagators.global_ntk import GlobalNTK, Precision
from gramscope.propagators.measures import block_squares, by_diagonal
from gramscope.propagators.prediction import outputs_of
from gramscope.tasks.many_tasks import TaskBattery


@dataclass(frozen=True, eq=False, repr=False)
class TaskInterference(TableResult, shown=("names", "cosines", "reach")):
    """Tasks against tasks; row a, column b: what a small step of gradient descent on b does to a.

    ``effects``: ``g_aᵀ NTK_S g_b``, how fast loss a falls; ``parts`` the same by parameter. ``cosines``: effects
    divided by the roots of the diagonal; 1: the same; 0: independent; below 0: one forgets what the other learns.
    ``reach``: ``|A_ab| / √(|A_aa| |A_bb|)`` of the blocks of NTK_S from trials of b to trials of a, whatever the
    losses, and ``reach_error`` its standard error.
    """

    names: tuple[str, ...]
    effects: Float64[Tensor, "a b"] = field(repr=False)
    parts: Mapping[str, Float64[Tensor, "a b"]] = field(repr=False)
    cosines: Float64[Tensor, "a b"]
    reach: Float64[Tensor, "a b"]
    reach_error: Float64[Tensor, "a b"] = field(repr=False)

    def _table(self) -> tuple[dict[str, list[float]], tuple[str, ...]]:
        """The cosines: a row for the task that is moved, a column for the one that is learnt."""
        return dict(zip(self.names, self.cosines.mT.tolist(), strict=True)), self.names

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The cosines as a heat map; a figure."""
        return heat_map(self.cosines, "Alignment of the tasks' objectives", "moved", "learnt", axes=axes)


@torch.no_grad()
def task_interference(
    model: nn.Module, task: TaskBattery, *, products: int | None = 32, seed: int = 0, precision: Precision = None
) -> TaskInterference:
    """How the tasks of a battery help or hinder one another in a network that learns them all.

    With ``g_a = ∇_s loss_a`` a step of size η on loss b changes loss a by ``-η g_aᵀ NTK_S g_b``, ``NTK_S = P K P*``.
    One product with ``(P J)*`` for each task: no matrix of states is formed.

    Args:
        model: takes ``task.x`` (trial, time, i) and gives outputs (trial, time, o); it is left as it was.
        task: of :func:`gramscope.tasks.battery`.
        products: random signs for each task that estimate ``reach``, ``E‖A_ab z‖² = |A_ab|²``. None: exact, from all
            columns, for small networks.
        seed: of these.
        precision: as in :class:`GlobalNTK`.

    Reference: arXiv:2507.06381 (how objectives of sub-tasks align).

    Example:
        >>> from gramscope.tasks import battery, recurrent
        >>> task = battery(("go_anti", "n_back"), trials=2)
        >>> found = task_interference(recurrent("gru", task.x.shape[2], 8, task.y.shape[2]), task, products=4)
        >>> found.names, found.cosines.diagonal().round(decimals=6).tolist()
        (('go_anti', 'n_back'), [1.0, 1.0])
    """
    if not isinstance(task, TaskBattery):
        raise InputError(f"task must be a TaskBattery, got {type(task).__name__}. Make one with gs.tasks.battery.")
    if products is not None:
        check_count(products, "products", least=3)
    x = task.x.to(next((p for p in model.parameters()), task.x))
    g = GlobalNTK(model, x, precision=precision)
    if g.axes.names[0] != "trial":
        raise InputError(
            f"each trial must have states of its own, but the network mixes them: its axes are {g.axes!r}."
        )
    names = tuple(task.groups)
    parts = _effects(g, task, names)
    effects = sum(parts.values(), torch.zeros(len(names), len(names), dtype=torch.float64, device="cpu"))
    reach, error = _reach(g.operator, task.groups, products, seed)
    return TaskInterference(names, effects, parts, by_diagonal(effects), reach, error)


def _effects(g: GlobalNTK, task: TaskBattery, names: tuple[str, ...]) -> dict[str, Float64[Tensor, "a b"]]:
    """Inner products of the tasks' gradients, by parameter: ``g_aᵀ P K_j P* g_b``."""
    f = outputs_of(g)
    if f.numel() != task.y.numel():
        raise InputError(
            f"the model must give outputs like the targets, {tuple(task.y.shape)}, got {f.numel()} numbers from "
            f"{len(task.x)} trials. Read out every step."
        )
    columns = []
    for name in names:
        _, gradient = loss_gradient(partial(task.loss_of, name), f.reshape(task.y.shape), "loss")
        columns.append(gradient.reshape(-1))
    slopes = g.jacobian.T @ (g.C.T @ torch.stack(columns, dim=1))
    by_name = g.jacobian.changes(slopes.mT)
    flat = {name: change.reshape(len(names), -1).double().cpu() for name, change in by_name.items()}
    return {name: rows @ rows.mT for name, rows in flat.items()}


def _reach(
    op: LinearOperator, groups: Mapping[str, Tensor], products: int | None, seed: int
) -> tuple[Float64[Tensor, "a b"], Float64[Tensor, "a b"]]:
    squares = block_squares(op, "trial", list(groups.values()), products, seed)
    value, m = by_diagonal(squares.mean(-1).sqrt()), squares.shape[-1]
    if products is None:
        return value, torch.zeros_like(value)
    others = torch.stack(
        [by_diagonal(((squares.sum(-1) - squares[..., k]) / (m - 1)).sqrt()) for k in range(m)], dim=-1
    )
    return value, jackknife_error(others)
