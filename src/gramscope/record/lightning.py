"""A Lightning callback that watches a fit; ``lightning`` is imported here and nowhere else."""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gramscope.base.nested import map_tensors
from gramscope.record.resuming import log_numbers, open_scope, use_those_of
from gramscope.record.scope import Scope


def _package() -> ModuleType:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ImportError("the Lightning callback needs lightning: pip install 'gramscope[lightning]'")


# The trainer's own classes: lightning has two homes, so neither can be named here.
Trainer: TypeAlias = Any
LightningModule: TypeAlias = Any
Callback: type = _package().Callback


class LightningWatch(Callback):  # type: ignore[misc]
    """``Trainer(callbacks=[LightningWatch(probe=(x, y), out="runs/a")])``; arguments as for :func:`gramscope.watch`.

    Steps are optimiser steps, numbered as the trainer does (also from a checkpoint): with ``accumulate_grad_batches=2``
    two batches make one. What ``self.log`` is given is kept at the step that was taken last. ``module`` names the part
    of the LightningModule to watch; the whole if None. A second fit goes on with the run.
    """

    def __init__(self, probe: object, out: object = None, *, module: str | None = None, **options: Any) -> None:
        super().__init__()
        self._arguments, self._module, self._options = (probe, out), module, options
        self.scope: Scope | None = None
        self._seen = 0
        self._loss: Tensor | None = None  # of the batches since the last optimiser step
        self._metrics: dict[str, Tensor] = {}  # as they stood when they were last looked at

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        probe, out = self._arguments
        model = pl_module if self._module is None else pl_module.get_submodule(self._module)
        self._seen = trainer.global_step
        probe = _moved(probe, pl_module.device)
        self.scope = open_scope(self.scope, model, probe, out, self._seen, self._options)
        use_those_of(self.scope, trainer.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if (
            self._loss is None
        ):  # what the module's own hooks logged after ours, not what a batch did that waits for more
            self._log_news(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Mapping[str, Tensor] | Tensor | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        if self.scope is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._loss is not None and loss is not None and pl_module.automatic_optimization:
            loss = self._loss + loss  # Lightning divides the loss of a batch by the number that it accumulates
        self._loss = loss
        if trainer.global_step == self._seen:
            return
        taken, self._seen = trainer.global_step - self._seen, trainer.global_step
        self.scope.advance(taken, loss)  # several optimisers step in one batch
        self._loss = None
        self._log_news(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_news(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log_news(trainer)

    def _log_news(self, trainer: Trainer) -> None:
        """What ``self.log`` was given since the last look, at the step that was taken last.

        Lightning lists the old numbers beside the new ones; a new one has memory of its own. A name that is logged by
        step and by epoch is listed three times, once without telling which it is.
        """
        if self.scope is None:
            return
        now = {name: value for name, value in trainer.callback_metrics.items() if isinstance(value, Tensor)}
        old, self._metrics = self._metrics, now
        news = {name: v for name, v in now.items() if name not in old or v.data_ptr() != old[name].data_ptr()}
        forked = {name for name in news if f"{name}_step" in now or f"{name}_epoch" in now}
        log_numbers(self.scope, {name: value for name, value in news.items() if name not in forked})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_news(trainer)
        if self.scope is not None:
            self.scope.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self.scope is not None:
            self.scope.close(measure=False)


def _moved(probe: object, device: torch.device) -> object:
    return map_tensors(lambda t: t.to(device), probe)
