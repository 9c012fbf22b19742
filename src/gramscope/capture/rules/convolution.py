"""Convolutions, as contractions of unfolded patches.

Forward: ``u[:, p] = W · patch_p(x)``. Transposed: u is folded from ``Wᵀ x_p``, so the roles swap: the input pixels
are the site inputs, and the patches of the backward signal are the signals.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.forms import Gain, Outer
from gramscope.capture.patches import patches
from gramscope.capture.recorder import Recorder, rule


@rule(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)
def convolution(
    recorder: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    arguments = (stride, padding, dilation, groups)
    spatial = weight.dim() - 2
    if not recorder.is_data(input) or recorder.is_data([weight, bias]) or input.dim() != weight.dim():
        return recorder.tap(func, (input, weight, bias, *arguments), {})
    leaf, bias_leaf = recorder.stand_in(weight), recorder.stand_in(bias)
    kernel, steps, holes = tuple(weight.shape[2:]), _tuple(stride, spatial), _tuple(dilation, spatial)
    edges = _padding(padding, kernel, holes)
    output = recorder.settle(func(input, leaf, bias_leaf, *arguments))
    data = input.detach()

    def inputs(part: slice) -> Tensor:
        return patches(data[part], kernel, steps, edges, holes, groups, tuple(output.shape[2:]))

    def arrange(signals: Tensor) -> Tensor:
        return signals.flatten(3).unflatten(2, (groups, -1)).permute(0, 1, 4, 2, 3)

    fan_in = math.prod(weight.shape[1:])
    axes = (groups, weight.shape[0] // groups, fan_in)
    form = Outer("convolution", inputs, arrange, fan_in, axes, (0, 1, 2))
    recorder.note(weight, leaf, output, form)
    _note_bias(recorder, bias, bias_leaf, output)
    return output


@rule(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
def transposed_convolution(
    recorder: Recorder, func: Any, input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    arguments = (stride, padding, output_padding, groups, dilation)
    spatial = weight.dim() - 2
    if not recorder.is_data(input) or recorder.is_data([weight, bias]) or input.dim() != weight.dim():
        return recorder.tap(func, (input, weight, bias, *arguments), {})
    leaf, bias_leaf = recorder.stand_in(weight), recorder.stand_in(bias)
    output = recorder.settle(func(input, leaf, bias_leaf, *arguments))
    kernel, steps, holes = tuple(weight.shape[2:]), _tuple(stride, spatial), _tuple(dilation, spatial)
    edges = tuple((p, p) for p in _tuple(padding, spatial))
    data = input.detach()

    def inputs(part: slice) -> Tensor:
        return data[part].flatten(2).unflatten(1, (groups, -1)).permute(0, 3, 1, 2)

    def arrange(signals: Tensor) -> Tensor:
        unfolded = patches(signals.flatten(0, 1), kernel, steps, edges, holes, groups, tuple(data.shape[2:]))
        return unfolded.unflatten(0, signals.shape[:2])

    fan_in, fan_out = weight.shape[0] // groups, math.prod(weight.shape[1:])
    form = Outer("transposed convolution", inputs, arrange, fan_in, (groups, fan_out, fan_in), (0, 2, 1))
    recorder.note(weight, leaf, output, form)
    _note_bias(recorder, bias, bias_leaf, output)
    return output


def _note_bias(recorder: Recorder, bias: Any, leaf: Any, output: Tensor) -> None:
    if bias is not None:
        shape = (1, output.shape[1], *([1] * (output.dim() - 2)))
        recorder.note(bias, leaf, output, Gain("bias", shape, None, tuple(output.shape)))


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    return (value,) * length if isinstance(value, int) else tuple(value) * (length if len(value) == 1 else 1)


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return tuple((0, 0) for _ in kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in _tuple(padding, len(kernel)))
