"""What ``watch`` is given, checked before training starts."""

import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from torch import nn
from torch.optim import Optimizer

from gramscope.base.checks import check_lr
from gramscope.base.errors import InputError
from gramscope.capture.network import Outputs
from gramscope.hierarchy.losses import loss_function
from gramscope.hierarchy.optimizer_step import inner_optimizer


@dataclass(frozen=True)
class WatchOptions:
    """The options of :func:`gramscope.watch`, which says what they mean, checked one by one."""

    measures: object = "*"
    layers: object = "*"
    loss: Any = None  # this and the next: whatever the user gave, checked below
    outputs: Outputs = None
    lr: Any = None
    overhead: Any = 0.05
    on_error: object = "warn"
    on_alert: Any = None
    forward: Any = None
    resume: object = False
    start: object = 0
    name: str | None = None
    config: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("warn", "raise"):
            raise InputError(f'on_error must be "warn" or "raise", got {self.on_error!r}.')
        if self.loss is not None:
            loss_function(self.loss)
        if self.forward is not None and not callable(self.forward):
            raise InputError(f"forward must be a function (scalars, step) -> None, got {self.forward!r}. Wrap it.")
        if self.on_alert is not None and not callable(self.on_alert):
            raise InputError(
                f"on_alert must be a function of an alert, got {self.on_alert!r}. Leave it out for warnings."
            )
        if self.lr is not None:
            check_lr(self.lr)
        resume_step(self.resume)
        whole_step(self.start, "start")

    @property
    def raises(self) -> bool:
        """Whether what fails stops training."""
        return bool(self.on_error == "raise")


def check_out(out: object) -> Path | None:
    """The directory of the run, if there is to be one."""
    if out is None:
        return None
    if not isinstance(out, str | os.PathLike):
        raise InputError(f"out must be the path of a directory, or None, got {out!r}. Write e.g. out='runs/a'.")
    if not str(out) or "\0" in str(out):
        raise InputError(f"out must name a directory, got {str(out)!r}. out=None keeps the records in memory only.")
    return Path(out)


def globs(given: object, what: str) -> list[str]:
    """Names or globs, one or several."""
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    names = [pattern for pattern in found if isinstance(pattern, str)]
    wrong = [pattern for pattern in found if not isinstance(pattern, str)]
    if wrong:
        raise InputError(
            f"{what} must be a name or glob, or several of them in a list, got {wrong[0]!r} of type "
            f"{type(wrong[0]).__name__}. Pass names as text, or leave it out for all."
        )
    return names


def check_optimizer(given: object, model: nn.Module) -> Optimizer:
    """The optimiser itself, also out of a wrapper; it must move the model."""
    optimizer = inner_optimizer(given)
    if optimizer is None:
        raise InputError(
            f"optimizer must be a torch.optim.Optimizer, or hold one as .optimizer, got {type(given).__name__}. Pass "
            "the one whose step() the loop calls."
        )
    if not moves(optimizer, model):
        raise InputError(
            f"optimizer must hold parameters of the watched model, but this {type(optimizer).__name__} holds none of "
            f"them: it moves another model, or was made before the parameters of this {type(model).__name__} were "
            "replaced. Pass the one that moves it; of several, only those that move parts of it."
        )
    return optimizer


def moves(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimiser holds any parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def whole_step(value: object, what: str, also: str = "") -> int:
    """``value`` as a number of steps."""
    try:
        if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"{what} must be {also}a whole number of steps >= 0, got {value!r}.")
    return number


def resume_step(resume: object) -> int | bool:
    """True and False as they are, also numpy's; anything else must be a step."""
    if isinstance(resume, bool | np.bool_):
        return bool(resume)
    return whole_step(resume, "resume", "True, False or ")
