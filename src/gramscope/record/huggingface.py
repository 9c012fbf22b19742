"""A Hugging Face ``TrainerCallback`` that watches training. Needs ``transformers``, imported here and nowhere else."""

import weakref
from collections.abc import Mapping
from typing import Any

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError("the Trainer callback needs transformers: pip install 'gramscope[transformers]'") from missing

from torch import nn

from gramscope.base.nested import map_tensors
from gramscope.record.resuming import log_numbers, open_scope, use_those_of
from gramscope.record.scope import Scope


class TrainerWatch(TrainerCallback):
    """``Trainer(..., callbacks=[TrainerWatch(probe=(x, y), out="runs/a")])``; arguments as for
    :func:`gramscope.watch`.

    Steps are optimiser steps, numbered as the trainer does (also from a checkpoint), gradient accumulation included. A
    second ``train`` goes on with the run. A probe's x is mostly a dict of ``input_ids`` and ``attention_mask``. For a
    language model ``y[:, t]`` is the label of the output at t: ``x = ids[:, :-1], y = ids[:, 1:]``.
    """

    def __init__(self, probe: object, out: object = None, **options: Any) -> None:
        self._arguments, self._options = (probe, out), options
        self.scope: Scope | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module | None = None,
        optimizer: object = None, **kwargs: object,
    ) -> None:  # fmt: skip
        probe, out = self._arguments
        assert model is not None  # the Trainer passes it
        device = next(model.parameters()).device
        probe = map_tensors(lambda t: t.to(device), probe)
        self.scope = open_scope(self.scope, model, probe, out, state.global_step, self._options)
        weakref.finalize(self, self.scope.close, False)  # the Trainer tells nobody of an interruption
        use_those_of(self.scope, [optimizer])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.scope is not None:
            self.scope.step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """The Trainer logs losses and evaluations after the end of their step, which is the last that was counted."""
        if self.scope is not None and logs:
            log_numbers(self.scope, {name: v for name, v in logs.items() if isinstance(v, int | float)})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.scope is not None:
            self.scope.close(measure=not args.load_best_model_at_end)  # whose weights are not those of the last step
