"""Where people already look: functions for ``gs.watch(forward=...)`` that hand every record on to another tool.

Each package is imported when its adapter is made, and nowhere else.
"""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gramscope.base.errors import InputError

Forward = Callable[[Mapping[str, float], int], None]
GROUP = "gramscope/"  # before the names in a run that holds the user's own numbers too


def to_tensorboard(folder: Any) -> Forward:
    """Write every record to TensorBoard: ``gs.watch(..., forward=gs.to_tensorboard("runs/tb"))``.

    ``folder`` is a log directory, or a ``SummaryWriter`` of your own. Events are flushed after each record.
    """
    if isinstance(folder, str | Path):
        folder = _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter(str(folder))
    if not hasattr(folder, "add_scalar"):
        raise InputError(f"folder must be a log directory or a SummaryWriter, got {type(folder).__name__}.")

    def forward(scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            folder.add_scalar(name, value, step)
        folder.flush()

    return forward


def to_wandb(run: Any = None, **options: Any) -> Forward:
    """Log every record to Weights & Biases: ``gs.watch(..., forward=gs.to_wandb(project="digits"))``.

    ``run`` is what ``wandb.init`` gave; without it the run that is open, or a new one, ``wandb.init(**options)``
    (``mode="offline"`` needs no network). The names begin with ``gramscope/``, and their x axis is ``gramscope/step``,
    the optimiser step: the steps of your own logs keep their meaning.
    """
    wandb = _imported("wandb", "Weights & Biases", "wandb")
    if run is not None and options:
        raise InputError(f"options are for a new run, but a run was given with {', '.join(options)}. Pass one of them.")
    chosen = run or (wandb.init(**options) if options or wandb.run is None else wandb.run)
    chosen.define_metric(f"{GROUP}step", hidden=True)
    chosen.define_metric(f"{GROUP}*", step_metric=f"{GROUP}step")

    def forward(scalars: Mapping[str, float], step: int) -> None:
        chosen.log({f"{GROUP}step": step} | {GROUP + name: value for name, value in scalars.items()})

    return forward


def to_mlflow(run_id: str | None = None) -> Forward:
    """Log every record to MLflow: ``gs.watch(..., forward=gs.to_mlflow())``.

    ``run_id`` is an MLflow run's; without it the active run, or a new one (``mlflow.start_run()``). Where the numbers
    go is MLflow's tracking address, as for your own metrics. Characters that MLflow refuses in a name become ``_``.
    """
    mlflow = _imported("mlflow", "MLflow", "mlflow")
    chosen = run_id or (mlflow.active_run() or mlflow.start_run()).info.run_id

    def forward(scalars: Mapping[str, float], step: int) -> None:
        named = {GROUP + re.sub(r"[^\w\-. /]", "_", name): value for name, value in scalars.items()}
        mlflow.log_metrics(named, step=step, run_id=chosen, synchronous=True)

    return forward


def _imported(module: str, tool: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"writing to {tool} needs its package: pip install 'gramscope[{package}]'") from error
