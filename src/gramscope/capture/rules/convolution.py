"""Convolutions, as contractions of unfolded patches.

Forward: ``u[:, p] = W · patch_p(x)``. Transposed: u is folded from ``Wᵀ x_p``, so the roles swap: the input pixels
are the site inputs, and the patches of the backward signal are the signals.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.channels import channels_last
from gramscope.capture.forms import Gain, Outer
from gramscope.capture.recorder import Demand, Recorder, rule

# Images in one backward convolution on the CPU; 32 to 128 did equally well on two threads, a thousand at once worse.
IMAGES = 128


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
    sizes = geometry(weight, stride, padding, dilation)
    if sizes is not None and not torch.is_autocast_enabled(input.device.type):
        output = FoldedConvolution.apply(input, leaf, bias_leaf, *sizes, groups, recorder.demand)  # type: ignore[no-untyped-call]
    else:
        output = recorder.settle(func(input, leaf, bias_leaf, *arguments))
    data = input.detach()

    def inputs(part: slice) -> Tensor:
        return patches(data[part], kernel, steps, edges, holes, groups, tuple(output.shape[2:]))

    def arrange(signals: Tensor) -> Tensor:
        return signals.flatten(3).unflatten(2, (groups, -1)).permute(0, 1, 4, 2, 3)

    fan_in = math.prod(weight.shape[1:])
    axes = (groups, weight.shape[0] // groups, fan_in)
    form = Outer(
        "convolution", inputs, arrange, fan_in, axes, (0, 1, 2), rows_first=True,
        offset=None if bias is None else bias.detach(),
    )  # fmt: skip
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
    form = Outer(
        "transposed convolution", inputs, arrange, fan_in, (groups, fan_out, fan_in), (0, 2, 1), rows_first=True
    )
    recorder.note(weight, leaf, output, form)
    _note_bias(recorder, bias, bias_leaf, output)
    return output


class FoldedConvolution(torch.autograd.Function):
    """A convolution whose backward pass, batched over outputs, is one transposed convolution of a larger batch.

    torch's own backward of a convolution runs once for each output under vmap. Gradients of weight and bias are given
    only while the fallback asks for them, because a backward pass for signals should not pay for them.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...],
        dilation: tuple[int, ...], groups: int, demand: Demand,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight, bias)
        ctx.geometry, ctx.demand = (stride, padding, dilation, groups), demand
        rank = len(stride)
        return torch.convolution(input, weight, bias, stride, padding, dilation, False, (0,) * rank, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (signal,) = gradients
        input, weight, bias = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        back, by_weight, by_bias = None, None, None
        if ctx.needs_input_grad[0]:
            few = max(1, IMAGES // ctx.demand.directions)
            back = backward_signal(signal, weight, input.shape, stride, padding, dilation, groups, few)
        if ctx.demand.weight_gradients:
            masks = [False, True, bias is not None]
            sizes = None if bias is None else [bias.shape[0]]
            _, by_weight, by_bias = torch.ops.aten.convolution_backward(
                signal, input, weight, sizes, stride, padding, dilation, False, [0] * len(stride), groups, masks
            )
        return back, by_weight, by_bias, None, None, None, None, None


Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # stride, padding, dilation


def geometry(weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Geometry | None:
    """Steps, edges and holes along each axis; None where the two edges of an axis differ."""
    spatial = weight.dim() - 2
    holes = _tuple(dilation, spatial)
    edges = _padding(padding, tuple(weight.shape[2:]), holes)
    if any(low != high for low, high in edges):
        return None
    return _tuple(stride, spatial), tuple(low for low, _ in edges), holes


def backward_signal(
    signal: Tensor, weight: Tensor, shape: torch.Size, stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], groups: int, few: int = IMAGES,
) -> Tensor:  # fmt: skip
    """The signal at a convolution's input; few images at a time on the CPU, so that they stay in its cache."""
    sizes = (stride, padding, dilation, groups)
    if signal.device.type != "cpu" or len(signal) <= 2 * few or channels_last(signal):
        return _back(signal, weight, shape, *sizes)
    return torch.cat([_back(part, weight, shape, *sizes) for part in signal.split(few)])


def _back(
    signal: Tensor, weight: Tensor, shape: torch.Size, stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], groups: int,
) -> Tensor:  # fmt: skip
    """The signal at a convolution's input."""
    if signal.device.type == "cpu" and groups == 1 and set(weight.shape[2:]) == {1} and not any(padding):
        return _back_pointwise(signal, weight, shape, stride)
    reach = _reach(weight, dilation)
    edges = tuple(r - p for r, p in zip(reach, padding, strict=True))
    if signal.device.type == "cpu" and groups == 1 and set(stride) == {1} and min(edges) >= 0:
        # With unit steps it is a plain convolution with the turned kernel, which CPUs do best.
        turned = weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1)
        return torch.convolution(signal, turned, None, stride, edges, dilation, False, (0,) * len(stride), 1)
    spans = [(u - 1) * s - 2 * p + r + 1 for u, s, p, r in zip(signal.shape[2:], stride, padding, reach, strict=True)]
    extra = tuple(x - span for x, span in zip(shape[2:], spans, strict=True))
    return torch.convolution(signal, weight, None, stride, padding, dilation, True, extra, groups)


def _back_pointwise(signal: Tensor, weight: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A kernel of one entry: a matrix product, and zeros where its steps pass over the image."""
    if channels_last(signal):
        seen = (signal.movedim(1, -1) @ weight.flatten(1)).movedim(-1, 1)
    else:
        seen = (weight.flatten(1).T @ signal.flatten(2)).view(len(signal), -1, *signal.shape[2:])
    if set(stride) == {1}:
        return seen
    image = seen.new_zeros(*seen.shape[:2], *shape[2:])
    image[(slice(None), slice(None), *(slice(None, None, step) for step in stride))] = seen
    return image


def _reach(weight: Tensor, dilation: tuple[int, ...]) -> list[int]:
    """How far a kernel reaches beyond its first entry."""
    return [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]


def patches(
    image: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...], groups: int, places: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """(B, channels, *image) -> (B, T, g, channels/g · kernel): what each of T = Π ``places`` kernel positions sees."""
    # Positions that reach past the far edge (an output padding, a stride that does not divide) see zeros.
    spans = [(p - 1) * s + (k - 1) * d + 1 for p, s, k, d in zip(places, stride, kernel, dilation, strict=True)]
    far = [max(hi, span - size - lo) for size, span, (lo, hi) in zip(image.shape[2:], spans, padding, strict=True)]
    flat = [edge for (low, _), high in reversed(list(zip(padding, far, strict=True))) for edge in (low, high)]
    padded = F.pad(image, flat) if any(flat) else image
    base = padded.stride()
    windows = padded.as_strided(
        (*padded.shape[:2], *places, *kernel),
        (*base[:2], *(b * s for b, s in zip(base[2:], stride, strict=True)),
         *(b * d for b, d in zip(base[2:], dilation, strict=True))),
        padded.storage_offset(),
    )  # fmt: skip
    # Gathered with the positions innermost, where memory runs on, and seen with the entries innermost.
    spatial = len(kernel)
    grouped = windows.unflatten(1, (groups, -1))  # (B, g, c, *places, *kernel)
    order = (0, 1, 2, *range(3 + spatial, 3 + 2 * spatial), *range(3, 3 + spatial))
    gathered = grouped.permute(order).reshape(len(image), groups, -1, math.prod(places))
    return gathered.permute(0, 3, 1, 2)


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
