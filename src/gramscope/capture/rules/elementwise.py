"""Weights that act entry by entry: added, multiplied, or in any other broadcast operation."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.forms import Gain, elementwise_factor
from gramscope.capture.recorder import Recorder, rule

NAMES = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "pow", "maximum",
         "minimum", "lerp", "addcmul", "addcdiv", "atan2", "hypot", "logaddexp", "where", "fmod", "copysign",
         "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
         "__pow__", "__rpow__")  # fmt: skip
FUNCTIONS = tuple({getattr(room, name) for room in (torch, torch.Tensor) for name in NAMES if hasattr(room, name)})
IN_PLACE = {
    getattr(torch.Tensor, written): getattr(torch.Tensor, plain)
    for plain, written in [(n, f"{n}_") for n in NAMES if not n.startswith("_")]
    + [("add", "__iadd__"), ("sub", "__isub__"), ("mul", "__imul__"), ("div", "__itruediv__")]
    if hasattr(torch.Tensor, written)
}
ADDITIONS = {"add", "__add__", "__radd__", "add_", "__iadd__"}


@rule(*FUNCTIONS)
def elementwise(recorder: Recorder, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if recorder.weights_in(kwargs) or kwargs.get("out") is not None:
        return recorder.tap(func, args, kwargs)
    leaves = [recorder.stand_in(a) for a in args]
    output = recorder.settle(func(*leaves, **kwargs))
    _note_gains(recorder, func, args, kwargs, leaves, output)
    return output


@rule(*IN_PLACE)
def elementwise_in_place(recorder: Recorder, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    plain = IN_PLACE[func]
    simple = func.__name__ in ADDITIONS and not kwargs
    # The operation overwrites its first argument, which the factor may need.
    kept = args if simple else (args[0].detach().clone(), *args[1:])
    leaves = [recorder.stand_in(a) for a in args]
    output = func(*leaves, **kwargs)
    _note_gains(recorder, plain, (args[0], *args[1:]), kwargs, leaves, output, kept)
    return output


def _note_gains(
    recorder: Recorder,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    leaves: list[Any],
    output: Tensor,
    kept: Any = None,
) -> None:
    operands = tuple(a.detach() if isinstance(a, Tensor) else a for a in (kept or args))
    one, shape = func.__name__ in ADDITIONS and not kwargs, output.shape
    for place, arg in enumerate(args):
        if recorder.weight(arg) is None:
            continue

        def factor(place: int = place) -> Tensor:
            return elementwise_factor(func, operands, kwargs, place, shape)

        form = Gain("elementwise", tuple(arg.shape), None if one else factor, tuple(shape))
        recorder.note(arg, leaves[place], output, form)


@rule(torch.prelu, F.prelu, torch.Tensor.prelu)
def prelu(recorder: Recorder, func: Callable[..., Any], input: Tensor, weight: Tensor) -> Any:
    if not recorder.is_data(input) or recorder.weight(weight) is None:
        return recorder.tap(func, (input, weight), {})
    leaf = recorder.stand_in(weight)
    output = recorder.settle(torch.prelu(input, leaf))
    data = input.detach()
    channels = weight.numel()
    shape = (1, channels, *([1] * (input.dim() - 2))) if channels > 1 else (1,)
    recorder.note(weight, leaf, output, Gain("prelu", shape, lambda: data.clamp_max(0), tuple(output.shape)))
    return output
