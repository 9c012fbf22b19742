"""Gains and offsets of normalisation layers: ``u = gain · x̂ + offset``, x̂ the normalised input."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.forms import Gain
from gramscope.capture.recorder import Recorder, rule


def _affine(
    recorder: Recorder,
    name: str,
    normalise: Callable[[Tensor, Any, Any], Tensor],
    input: Tensor,
    gain: Tensor | None,
    offset: Tensor | None,
    shape: tuple[int, ...],
) -> Tensor:
    """``normalise(input, gain, offset)`` with both noted; ``shape`` is how they broadcast against the result."""
    if not recorder.is_data(input) or recorder.is_data([gain, offset]):
        return recorder.tap(normalise, (input, gain, offset), {})
    gain_leaf, offset_leaf = recorder.stand_in(gain), recorder.stand_in(offset)
    output = recorder.settle(normalise(input, gain_leaf, offset_leaf))
    data = input.detach()

    def factor() -> Tensor:
        with torch.no_grad():
            return normalise(data, None, None)

    recorder.note(gain, gain_leaf, output, Gain(name, shape, factor, tuple(output.shape)))
    recorder.note(offset, offset_leaf, output, Gain("bias", shape, None, tuple(output.shape)))
    return output


def _per_channel(input: Tensor) -> tuple[int, ...]:
    return (1, input.shape[1], *([1] * (input.dim() - 2)))


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    def normalise(x: Tensor, gain: Any, offset: Any) -> Tensor:
        return torch.layer_norm(x, tuple(normalized_shape), gain, offset, eps)

    return _affine(recorder, "layer norm", normalise, input, weight, bias, tuple(normalized_shape))


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    def normalise(x: Tensor, gain: Any, offset: Any) -> Tensor:
        return torch.rms_norm(x, tuple(normalized_shape), gain, eps)

    return _affine(recorder, "rms norm", normalise, input, weight, None, tuple(normalized_shape))


@rule(F.group_norm, torch.group_norm)
def group_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    def normalise(x: Tensor, gain: Any, offset: Any) -> Tensor:
        return torch.group_norm(x, num_groups, gain, offset, eps)

    return _affine(recorder, "group norm", normalise, input, weight, bias, _per_channel(input))


@rule(F.batch_norm)
def batch_norm(
    recorder: Recorder, func: Any, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    def normalise(x: Tensor, gain: Any, offset: Any) -> Tensor:
        # Running statistics must not be updated once more when only the factor is wanted.
        updates = training and (gain is not None or offset is not None)
        mean, var = (running_mean, running_var) if updates or not training else (None, None)
        return torch.batch_norm(x, gain, offset, mean, var, training, momentum, eps, torch.backends.cudnn.enabled)

    return _affine(recorder, "batch norm", normalise, input, weight, bias, _per_channel(input))


@rule(F.instance_norm)
def instance_norm(
    recorder: Recorder, func: Any, input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    def normalise(x: Tensor, gain: Any, offset: Any) -> Tensor:
        return torch.instance_norm(
            x,
            gain,
            offset,
            running_mean,
            running_var,
            use_input_stats,
            momentum,
            eps,
            torch.backends.cudnn.enabled,
        )

    return _affine(recorder, "instance norm", normalise, input, weight, bias, _per_channel(input))
