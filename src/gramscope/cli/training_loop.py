"""Plain training of a network on a task under the watcher; shared by ``demo`` and ``run``."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import Scope, WatchWarning
from gramscope.store.records import META_FILE
from gramscope.tasks import Task


def train(
    model: nn.Module, task: Task, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor],
    *, steps: int, batch: int, seed: int, out: Path, every: object, probe: tuple[Tensor, Tensor], label: str,
    console: Console, lines: bool = False, **options: Any,
) -> Scope:  # fmt: skip
    """``steps`` optimiser steps on random batches, watched; the test accuracy goes into the record.

    Loss and accuracy stand beside the progress bar; with ``lines`` each measurement also prints a line.
    """
    generator = torch.Generator().manual_seed(seed)
    # Labels are judged by cross-entropy anyway; of a loss passed in, the diagnosis would not know the value at chance.
    own = None if loss is nn.functional.cross_entropy else loss
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn()
    with (
        _briefly(),
        gs.watch(model, probe=probe, out=out, every=every, loss=own, **options) as scope,
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
    ):
        _check_opened(out)
        scope.use(optimizer)
        scope.log(**{"accuracy/test": accuracy(model, task)})
        bar = progress.add_task(label, total=steps)
        for step in range(1, steps + 1):
            chosen = torch.randint(len(task.x), (min(batch, len(task.x)),), generator=generator, device="cpu")
            optimizer.zero_grad()
            value = loss(model(task.x[chosen]), task.y[chosen])
            value.backward()
            optimizer.step()
            right = accuracy(model, task) if scope.due_next() else None
            scope.step(loss=value, **{} if right is None else {"accuracy/test": right})
            progress.advance(bar)
            if right is not None:
                said = f"loss {float(value.detach()):.4f}  test accuracy {right:.1%}"
                progress.update(bar, description=f"{label}  {said}")
                if lines:
                    progress.console.print(f"step {step:>6,}  {said}", highlight=False)
        scope.log(**{"accuracy/test": accuracy(model, task)})
    return scope


def _check_opened(out: Path) -> None:
    """A watcher in a user's own loop trains on where nothing can be written; here the run is all that is asked for."""
    if not (out / META_FILE).is_file():
        raise InputError(
            f"the folder of the run must be one that can be written, but no run could be opened in {out}. "
            "Choose another."
        )


@contextmanager
def _briefly() -> Iterator[None]:
    """Shows each kind of the watcher's warnings once, as one line: a run that diverges would give hundreds."""
    seen: set[str] = set()
    more = 0
    with warnings.catch_warnings():
        others = warnings.showwarning

        def tell(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            nonlocal more
            if not issubclass(category, WatchWarning):
                others(message, category, filename, lineno, file, line)
                return
            kind = re.sub(r"'[^']*'|\d+", "", str(message))  # whatever measure and step it names
            if kind in seen:
                more += 1
                return
            seen.add(kind)
            print(f"Warning: {message}", file=sys.stderr)

        warnings.showwarning = tell
        yield
    if more:
        print(f"Warning: {more} more like these; the run has them all, and its report tells them.", file=sys.stderr)


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    training = model.training
    model.eval()
    right = (model(task.x_test).argmax(1) == task.y_test).float().mean()
    model.train(training)
    return float(right)
