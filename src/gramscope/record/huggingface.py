"""A Hugging Face ``TrainerCallback`` that watches training. Needs ``transformers``, imported here and nowhere else."""

from typing import Any

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError("the Trainer callback needs transformers: pip install 'gramscope[transformers]'") from missing

from gramscope.capture.recorder import map_tensors
from gramscope.record.watch import Scope, watch


class WatchCallback(TrainerCallback):
    """``Trainer(..., callbacks=[WatchCallback(probe=(x, y), out="runs/a")])``; arguments as for
    :func:`gramscope.watch`.

    ``on_step_end`` fires once for each optimiser step, gradient accumulation included. A probe's x is mostly a dict of
    ``input_ids`` and ``attention_mask``.
    """

    def __init__(self, probe: Any, out: Any = None, **options: Any) -> None:
        self._arguments, self._options = (probe, out), options
        self.scope: Scope | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None,
        optimizer: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        probe, out = self._arguments
        device = next(model.parameters()).device
        self.scope = watch(model, map_tensors(lambda t: t.to(device), probe), out, **self._options)
        if optimizer is not None:
            self.scope.use(getattr(optimizer, "optimizer", optimizer))  # accelerate wraps the real one

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.scope is not None:
            self.scope.step()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.scope is not None and logs:
            self.scope.log(**{name: value for name, value in logs.items() if isinstance(value, int | float)})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.scope is not None:
            self.scope.close()
