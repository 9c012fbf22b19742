"""Operations whose higher derivatives torch gets wrong or does not have, written out in plain ones.

Fused normalisations keep their mean and scale as constants in the formula of their second derivative: differentiated
once more, they are silently wrong (torch 2.13: 29 % in the velocity of a small layer-norm network). Fused recurrent
cells have no second derivative at all. The values are the same to rounding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramscope.base.errors import UnsupportedError
from gramscope.capture.torch_calls import Args, Kwargs, TorchFunction
from gramscope.capture.unrolled import UNROLLED


class TwiceDifferentiable(TorchFunctionMode):
    """Runs the operations of this file by their definition, everything else as it is."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        written = _DEFINITIONS.get(func)
        return func(*args, **kwargs) if written is None else written(*args, **kwargs)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    return _affine(_standardised(input, axes, eps), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(input * torch.rsqrt(input.square().mean(axes, keepdim=True) + eps), weight, None)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    return _by_channel(_standardised(grouped, (-1,), eps).reshape(input.shape), weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        others = (0, *range(2, input.dim()))
        return _by_channel(_standardised(input, others, eps), weight, bias)
    if running_mean is None or running_var is None:
        raise UnsupportedError("batch_norm must have running statistics outside training, but it has none.")
    centred = input - _channels(running_mean, input)
    return _by_channel(centred * torch.rsqrt(_channels(running_var, input) + eps), weight, bias)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    return _by_channel(_standardised(input, tuple(range(2, input.dim())), eps), weight, bias)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: int | float | None = None,
    norm_type: int | float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A table's gradient as a dense tensor; sparse ones cannot be differentiated further."""
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    if max_norm is not None:
        raise UnsupportedError("embedding_bag with max_norm rewrites its own table, which has no second derivative.")
    if offsets is None:
        offsets = torch.arange(0, input.numel(), input.shape[1], device=input.device)
    elif include_last_offset:
        offsets = offsets[:-1]
    ids, bags = input.reshape(-1), len(offsets)
    bag = torch.searchsorted(offsets, torch.arange(len(ids), device=ids.device), right=True) - 1
    kept = torch.ones_like(ids, dtype=torch.bool)
    if padding_idx is not None:
        kept = ids != padding_idx % len(weight)
    ids, bag = ids[kept], bag[kept]
    rows = weight[ids]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1)[kept][:, None]
    empty = rows.new_zeros(bags, rows.shape[1])
    if mode == "max":
        return empty.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax", include_self=False)
    total = empty.index_add(0, bag, rows)
    counts = torch.bincount(bag, minlength=bags).clamp_min(1).to(rows.dtype)
    return total / counts[:, None] if mode == "mean" else total


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result = F.relu6(input + 3) / 6
    return input.copy_(result) if inplace else result


def _standardised(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(axes, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _affine(x, *(None if t is None else _channels(t, x) for t in (weight, bias)))


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    """A number for each channel, laid along axis 1."""
    return vector.reshape(-1, *(1,) * (like.dim() - 2))


_DEFINITIONS: dict[TorchFunction, TorchFunction] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.hardsigmoid: _hardsigmoid,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    **UNROLLED,
}
if hasattr(F, "rms_norm"):
    _DEFINITIONS[F.rms_norm] = _rms_norm
    _DEFINITIONS[torch.rms_norm] = _rms_norm
