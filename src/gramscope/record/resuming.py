"""What the callbacks share. A second fit, or one from a checkpoint, goes on with the run that is there."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gramscope.base.errors import InputError
from gramscope.hierarchy.optimizer_step import inner_optimizer
from gramscope.record.scope import Scope
from gramscope.record.start_watch import watch
from gramscope.record.watch_options import check_out, moves
from gramscope.store.records import META_FILE


def open_scope(
    before: Scope | None,
    model: nn.Module,
    probe: object,
    out: object,
    step: int,
    options: Mapping[str, Any],
) -> Scope:
    """Watch from the trainer's ``step`` on; ``before`` is what this callback watched with in an earlier fit."""
    options = dict(options)
    folder = check_out(out)
    if before is not None:
        before.close(measure=False)  # a fit that was interrupted did not
    there = folder is not None and (folder / META_FILE).exists()
    if there and step and options.get("resume", True) is True:
        options["resume"] = step  # the trainer was loaded from a checkpoint, or goes on: what came later is superseded
    elif there and before is not None:
        options["resume"] = True
    elif "resume" not in options or not there:
        options.setdefault("start", step or (before.count if before is not None else 0))
    return watch(model, probe, out, **options)


def use_those_of(scope: Scope, optimizers: Iterable[object]) -> None:
    """Tell the watch of the trainer's optimisers that move parameters of its model."""
    known = [optimizer for optimizer in map(inner_optimizer, optimizers) if optimizer is not None]
    moving = [optimizer for optimizer in known if moves(optimizer, scope.model)]
    if moving:
        scope.use(*moving)


def log_numbers(scope: Scope, numbers: Mapping[str, Tensor | float]) -> None:
    """Keep what a trainer logs. A name that is taken is left out with a warning: a callback never stops training."""
    for name, value in numbers.items():
        try:
            if not scope.closed:  # an evaluation after training logs too
                scope.log(**{name: value})
        except InputError as error:
            scope.warn_once(name, str(error))
