"""Plain training of a network on a task under the watcher; shared by ``demo`` and ``run``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import gramscope as gs
from gramscope.record import Scope
from gramscope.tasks import Task


def train(
    model: nn.Module, task: Task, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor],
    *, steps: int, batch: int, seed: int, out: Path, every: Any, probe: tuple[Tensor, Tensor], label: str,
    console: Console, **options: Any,
) -> Scope:  # fmt: skip
    """``steps`` optimiser steps on random batches, watched; the test accuracy goes into the record."""
    generator = torch.Generator().manual_seed(seed)
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn()
    with (
        gs.watch(model, probe=probe, out=out, every=every, loss=loss, **options) as scope,
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
    ):
        scope.use(optimizer)
        bar = progress.add_task(label, total=steps)
        for _ in range(steps):
            chosen = torch.randint(len(task.x), (min(batch, len(task.x)),), generator=generator)
            optimizer.zero_grad()
            value = loss(model(task.x[chosen]), task.y[chosen])
            value.backward()
            optimizer.step()
            scope.log(**{"accuracy/test": accuracy(model, task)} if scope.due_next() else {})
            scope.step(loss=value)
            progress.advance(bar)
    return scope


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    training = model.training
    model.eval()
    right = (model(task.x_test).argmax(1) == task.y_test).float().mean()
    model.train(training)
    return float(right)
