"""A step really taken, in parts: what the gradient of now did, what memory added, what weight decay took."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.base.checks import check_lr
from gramscope.base.complex_numbers import real_view, with_precision_of
from gramscope.base.errors import InputError, UnsupportedError

Factory = Callable[[Iterable[Tensor]], Optimizer]
_ONE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Memo: TypeAlias = dict[Any, Any]  # of copy.deepcopy; torch adds keys of its own
ParamGroup: TypeAlias = dict[str, Any]  # as torch has it: options of many types
OptimizerLike = Optimizer | Factory | str | None
NAMED: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, eq=False)
class StepParts:
    """``Δθ = -D g + memory + decay`` for each parameter by name, D diagonal and g the gradient of now.

    Complex parameters appear as real and imaginary parts on a last axis.

    ``kind`` is "exact" where the formula of the optimiser is known (SGD, Adam, AdamW), "effective" where D was read
    off as ``-Δθ / g`` entry by entry.
    """

    change: dict[str, Tensor]
    preconditioner: dict[str, Tensor | float]
    memory: dict[str, Tensor]
    decay: dict[str, Tensor]
    kind: str


def prepare(
    optimizer: OptimizerLike, lr: float | None, parameters: Mapping[str, nn.Parameter], memo: Memo
) -> Optimizer:
    """An optimiser for the copied parameters: a copy of the user's with its state, or a new one."""
    optimizer = inner_optimizer(optimizer) or optimizer
    if isinstance(optimizer, Optimizer):
        twin = _twin(optimizer, memo)
        if lr is not None:
            check_lr(lr)
            for group in twin.param_groups:
                group["lr"] = lr
        held = {id(p) for group in twin.param_groups for p in group["params"]}
        if not any(id(p) in held for p in parameters.values()):
            raise InputError(
                "optimizer must hold parameters of the model, but it holds none of them. Pass the one in use."
            )
        return twin
    if lr is None:
        raise InputError("lr must be given unless optimizer is a torch optimiser that has its own.")
    check_lr(lr)
    if optimizer is None:
        return torch.optim.SGD(list(parameters.values()), lr=lr)
    if isinstance(optimizer, str):
        if optimizer not in NAMED:
            raise InputError(f"optimizer must be one of {', '.join(NAMED)}, or a torch optimiser, got {optimizer!r}.")
        return NAMED[optimizer](list(parameters.values()), lr=lr)
    made = optimizer(list(parameters.values())) if callable(optimizer) else optimizer
    if not isinstance(made, Optimizer):
        raise InputError(
            "optimizer must be a torch optimiser, a name, or make one of a list of parameters, got "
            f"{type(made).__name__}."
        )
    for group in made.param_groups:
        group["lr"] = lr
    return made


def inner_optimizer(given: object) -> Optimizer | None:
    """The torch optimiser that ``given`` is or wraps, as accelerate's and Lightning's do; None where there is none.

    A wrapper keeps the optimiser as ``.optimizer``, and has no hooks of its own, even if it is a subclass.
    """
    for _ in range(8):  # an attribute that stands for anything would never end
        if isinstance(given, Optimizer) and "_optimizer_step_post_hooks" in vars(given):
            return given
        given = getattr(given, "optimizer", None)
    return None


def _twin(optimizer: Optimizer, memo: Memo) -> Optimizer:
    """The same optimiser over the copied parameters. Its hooks, which belong to the user's loop, do not come along."""
    twin = copy.deepcopy(optimizer, memo)
    # Optimisers pickle their state and groups only; what else a subclass keeps (LBFGS its list of parameters) is lost.
    for name, value in vars(optimizer).items():
        if not hasattr(twin, name):
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def to_float64(optimizer: Optimizer) -> None:
    """Momenta and other memory in the precision of a float64 copy of the model."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = with_precision_of(value, torch.float64)


def take(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None],
    closure: Callable[[], Tensor],
) -> StepParts:  # fmt: skip
    """Step the (copied) parameters and say what the step was made of."""
    before = {name: real_view(p.detach()).clone() for name, p in parameters.items()}
    fresh = {name: not optimizer.state.get(p) for name, p in parameters.items()}
    for name, parameter in parameters.items():
        found = gradients[name]
        parameter.grad = None if found is None else found.clone()
    _step(optimizer, closure)
    change = {name: real_view(p.detach()) - before[name] for name, p in parameters.items()}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    factors: dict[str, Tensor | float] = {}
    memory, decay = {}, {}
    exact = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for name, parameter in parameters.items():
        group, g, moved = groups.get(id(parameter)), dense(gradients[name], parameter), change[name]
        # Without a gradient, or a place in the optimiser, a parameter stays where it is; memory alone (of LBFGS, which
        # has one for all) may still move it.
        if group is None or gradients[name] is None:
            factors[name], memory[name], decay[name] = 0.0, moved, torch.zeros_like(moved)
            continue
        if exact:
            factor, shrink = _formula(optimizer, group, optimizer.state.get(parameter, {}), fresh[name])
            sign = -1.0 if group.get("maximize") else 1.0
            factors[name] = sign * factor
            decay[name] = -shrink * before[name]
        else:
            factors[name] = torch.where(g != 0, -moved / torch.where(g != 0, g, torch.ones_like(g)), 0.0)
            decay[name] = torch.zeros_like(moved)
        memory[name] = moved + factors[name] * g - decay[name]
    return StepParts(change, factors, memory, decay, "exact" if exact else "effective")


def dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """The gradient as an ordinary real tensor: zeros for None, and sparse ones (of embeddings) filled up."""
    if gradient is None:
        return torch.zeros_like(real_view(parameter.detach()))
    return real_view(gradient if gradient.layout is torch.strided else gradient.to_dense())


def _step(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    """``step()``, with the closure where it is required (LBFGS), or where an optimiser that is not torch's may need it:
    sharpness-aware ones name it ``closure=None`` and fail without. Without one nothing of the user's runs, and the
    optimiser's own counters lie on the CPU, whatever the default device is."""
    taken = {name: p for name, p in inspect.signature(optimizer.step).parameters.items() if p.kind in _ONE}
    required = any(p.default is p.empty for p in taken.values())
    own = not type(optimizer).__module__.startswith("torch.optim.")
    try:
        if required or (own and "closure" in taken):
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            with torch.device("cpu"):
                optimizer.step()
    except RuntimeError as error:
        if "sparse" not in str(error) and "dense gradients" not in str(error):
            raise
        raise UnsupportedError(
            f"optimizer must take the model's gradients, but {type(optimizer).__name__} does not take all of them: "
            f"{error}. Give sparse embeddings and the other parameters an optimiser each, and explain them one by one."
        ) from error


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """The user's autocast stays in force, but its cache, which would serve the weights of before a step again, is
    neither read nor filled nor emptied: a loop that stands in one autocast trains on what is in it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _formula(optimizer: Optimizer, group: ParamGroup, state: Mapping[str, Any], fresh: bool) -> tuple[Any, Any]:
    """The factor on the gradient of now, and the factor on the parameter itself (weight decay)."""
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if isinstance(optimizer, torch.optim.SGD):
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        now = 1.0 if momentum == 0 or fresh else 1.0 - dampening
        factor = lr * (1.0 + momentum * now if group["nesterov"] and momentum else now)
        return factor, factor * weight_decay
    beta1, beta2 = (float(b) for b in group["betas"])
    count = float(state["step"]) if state else 1.0
    if not state:  # no gradient came here, so nothing moved
        return 0.0, 0.0
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    scale = (real_view(second) / (1 - beta2**count)).sqrt() + group["eps"]
    factor = lr * (1 - beta1) / (1 - beta1**count) / scale
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
    return factor, (lr * weight_decay if decoupled else factor * weight_decay)
