"""What is known of operations of torch beyond their values and first derivatives: one record for each.

- *As ramps.* A piecewise-linear operation is a sum of ramps ``r(z) = max(z, 0)`` and of smooth terms: leaky ReLU is
  ``a z + (1 - a) r(z)``, the absolute value ``2 r(z) - z``, a clamp ``lo + r(z - lo) - r(z - hi)``, an ELU
  ``a ELU_1(z) + (1 - a) r(z)``. A greatest entry is a choice of place instead.
- *Kinks* or jumps that are not written as ramps: such operations are named in results and refused where σ'' is
  smoothed, never passed over. Norms of order two, ``celu``, Huber's loss and ``lp_pool`` are not among them: the slope
  of a norm breaks at one point only, the others' nowhere.
- *Definition.* Torch gets higher derivatives of some operations wrong, or has none. Fused normalisations keep their
  mean and scale as constants in the formula of their second derivative: differentiated once more, they are silently
  wrong (torch 2.13: 29 % in the velocity of a small layer-norm network). Fused recurrent cells have no second
  derivative at all. Written in plain operations the values are the same to rounding.
- *Proven* operations need no check at run time: the tests compare their second derivatives with differences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.base.errors import UnsupportedError
from gramscope.ops.torch_calls import Args, Kwargs, TorchFunction, spellings
from gramscope.ops.unrolled import UNROLLED

Bound = Tensor | int | float  # of a clamp
Axis = int | Sequence[int]
Depends = Callable[[object], bool]  # on the parameters
EVERYWHERE = (torch, Tensor, F)


class Ramps:
    """What a ramp means, and the place of an extreme entry, which ``find`` tells."""

    def ramp(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def place(self, find: Callable[[], Tensor]) -> Tensor:
        raise NotImplementedError


@dataclass
class Operation:
    """One function of torch.

    ``as_ramps`` takes a :class:`Ramps`, then the arguments of the operation; it answers NotImplemented where these make
    it something that ramps do not describe. ``has_kinks`` says of arguments whether there are kinks or jumps that are
    not followed. ``definition`` can be differentiated any number of times.
    """

    name: str
    as_ramps: TorchFunction | None = None
    has_kinks: Callable[[Args, Kwargs, Depends], bool] = lambda *_: False
    definition: TorchFunction | None = None


OPERATIONS: dict[TorchFunction, Operation] = {}


def _know(names: str, places: tuple[object, ...] = EVERYWHERE, **known: TorchFunction) -> None:
    """Put something into the records of all functions of these names."""
    for name in names.split():
        for function in spellings(name, places):
            own = function.__name__.strip("_")
            vars(OPERATIONS.setdefault(function, Operation(name if own == "fn" else own))).update(known)


# As ramps -----------------------------------------------------------------------------------------


def _prelu(ramps: Ramps, z: Tensor, weight: Tensor) -> Tensor:
    slope = weight.reshape(-1, *(1,) * (z.dim() - 2)) if weight.numel() > 1 and z.dim() > 2 else weight
    return _leaky_relu(ramps, z, slope)


def _leaky_relu(ramps: Ramps, z: Tensor, negative_slope: Bound = 0.01) -> Tensor:
    return negative_slope * z + (1 - negative_slope) * ramps.ramp(z)


def _clamp(ramps: Ramps, z: Tensor, min: Bound | None = None, max: Bound | None = None) -> Tensor:
    low = z if min is None else min + ramps.ramp(z - min)
    return low if max is None else low - ramps.ramp(z - max)


def _hardsigmoid(ramps: Ramps, z: Tensor) -> Tensor:
    return _clamp(ramps, z + 3, 0, 6) / 6


def _elu(ramps: Ramps, z: Tensor, alpha: float = 1.0) -> Tensor:
    # With alpha = 1 the slope is continuous; with any other it jumps by 1 - alpha at zero.
    return F.elu(z) if alpha == 1 else alpha * F.elu(z) + (1 - alpha) * ramps.ramp(z)


def _rrelu(ramps: Ramps, z: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> object:
    return NotImplemented if training else _leaky_relu(ramps, z, (lower + upper) / 2)  # slopes drawn at random


def _threshold(ramps: Ramps, z: Tensor, threshold: float, value: float) -> object:
    return NotImplemented if threshold != value else value + ramps.ramp(z - threshold)  # else it jumps


def _max(
    ramps: Ramps, z: Tensor, other: Tensor | int | None = None, keepdim: bool = False, *, dim: int | None = None
) -> object:
    if isinstance(other, Tensor):
        return other + ramps.ramp(z - other)
    along = other if dim is None else dim
    found = _extreme(ramps, z, along, keepdim)
    return found[0] if along is None else torch.return_types.max(found)


def _min(
    ramps: Ramps, z: Tensor, other: Tensor | int | None = None, keepdim: bool = False, *, dim: int | None = None
) -> object:
    found: Any = _max(ramps, -z, -other if isinstance(other, Tensor) else other, keepdim, dim=dim)
    return -found if isinstance(found, Tensor) else torch.return_types.min((-found.values, found.indices))


def _amax(ramps: Ramps, z: Tensor, dim: Axis = (), keepdim: bool = False) -> Tensor:
    return _extreme(ramps, z, dim, keepdim)[0]


def _extreme(ramps: Ramps, z: Tensor, dim: Axis | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The greatest entries over some axes, all if none is named, and their places."""
    if z.dim() == 0:
        return z, torch.zeros_like(z, dtype=torch.int64)
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(z.dim()))
    axes = sorted(axis % z.dim() for axis in given)
    last = z.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes))
    places = ramps.place(lambda: last.detach().argmax(-1))
    values = last.gather(-1, places[..., None])[..., 0]
    if keepdim:
        shape = [1 if axis in axes else size for axis, size in enumerate(z.shape)]
        values, places = values.reshape(shape), places.reshape(shape)
    return values, places


def _max_pool(
    with_places: TorchFunction, axes: int, always: bool, ramps: Ramps, z: Tensor, *args: object,
    return_indices: bool = False, **kwargs: object,
) -> object:  # fmt: skip
    """The greatest entry of each window, with its place if asked for, or ``always``."""
    places = ramps.place(lambda: with_places(z, *args, **kwargs)[1])
    values = z.flatten(-axes).gather(-1, places.flatten(-axes)).reshape(places.shape)
    return (values, places) if always or return_indices else values


AS_RAMPS: dict[str, TorchFunction] = {
    "relu": lambda ramps, z: ramps.ramp(z),
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "rrelu": _rrelu,
    "abs absolute": lambda ramps, z: 2 * ramps.ramp(z) - z,
    "clamp clip": _clamp,
    "clamp_min": lambda ramps, z, min: _clamp(ramps, z, min),
    "clamp_max": lambda ramps, z, max: _clamp(ramps, z, None, max),
    "hardtanh": lambda ramps, z, min_val=-1.0, max_val=1.0: _clamp(ramps, z, min_val, max_val),
    "relu6": lambda ramps, z: _clamp(ramps, z, 0, 6),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda ramps, z: z * _hardsigmoid(ramps, z),
    "softshrink": lambda ramps, z, lambd=0.5: ramps.ramp(z - lambd) - ramps.ramp(-z - lambd),
    "elu": _elu,
    "selu": lambda ramps, z: 1.0507009873554805 * _elu(ramps, z, 1.6732632423543772),  # as its authors, and torch
    "threshold": _threshold,
    "max maximum fmax": _max,
    "min minimum fmin": _min,
    "amax": _amax,
    "amin": lambda ramps, z, dim=(), keepdim=False: -_amax(ramps, -z, dim, keepdim),
}
for _names, _rewrite in AS_RAMPS.items():
    _know(_names, as_ramps=_rewrite)
for _name, _places in (("max_pool", (torch, F)), ("adaptive_max_pool", (F,))):
    for _axes in (1, 2, 3):
        _both = getattr(F, f"{_name}{_axes}d_with_indices")
        _know(f"{_name}{_axes}d", _places, as_ramps=partial(_max_pool, _both, _axes, False))
        OPERATIONS[_both] = Operation(f"{_name}{_axes}d", as_ramps=partial(_max_pool, _both, _axes, True))


# Kinks and jumps that are not followed --------------------------------------------------------------


def _if(place: int, name: str, default: object, breaks: Callable[[object], bool]) -> Callable[..., bool]:
    """Kinks if an argument, ``name`` or positional at ``place``, has one of the values that make them."""
    return lambda args, kwargs, _: breaks(args[place] if len(args) > place else kwargs.get(name, default))


def _breaks(order: object) -> bool:
    """Whether ``|z|^p`` breaks off its slope at zero, or a norm picks one entry: p <= 1 or infinite."""
    return isinstance(order, int | float) and (order <= 1 or order == float("inf"))


# What makes whole numbers or truth values of numbers (comparisons, argmax, sort) is found by its result.
NONSMOOTH = """
    msort median nanmedian quantile nanquantile aminmax sign sgn round floor ceil trunc fix frac fmod remainder
    floor_divide heaviside copysign hardshrink renorm bernoulli gt ge lt le eq ne fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine __floordiv__ __rfloordiv__ __mod__ __rmod__ l1_loss margin_ranking_loss
    hinge_embedding_loss cosine_embedding_loss triplet_margin_loss triplet_margin_with_distance_loss
    multi_margin_loss multilabel_margin_loss fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
"""
_know(NONSMOOTH, has_kinks=lambda *_: True)
_know("norm normalize pdist", has_kinks=_if(1, "p", 2, _breaks))
_know("norm vector_norm matrix_norm", (torch.linalg,), has_kinks=_if(1, "ord", 2, _breaks))
_know("pairwise_distance dist cdist", has_kinks=_if(2, "p", 2, _breaks))
_know("smooth_l1_loss", has_kinks=_if(5, "beta", 1.0, lambda beta: beta == 0))
_know("gumbel_softmax", has_kinks=_if(2, "hard", False, bool))
_know("div divide", has_kinks=_if(2, "rounding_mode", None, lambda mode: mode is not None))
_know("embedding_bag", (F,), has_kinks=_if(6, "mode", "mean", lambda mode: mode == "max"))
_know("scatter_reduce index_reduce", has_kinks=_if(4, "reduce", None, lambda how: how in ("amax", "amin")))
# These choose by one of their arguments; with a fixed choice they are linear.
_know("where", (torch,), has_kinks=lambda args, kwargs, depends: depends(kwargs.get("condition", args[:1])))
_know("where", (Tensor,), has_kinks=lambda args, kwargs, depends: depends(kwargs.get("condition", args[1:2])))
_know("grid_sample", (F,), has_kinks=lambda args, kwargs, depends: depends(kwargs.get("grid", args[1:2])))


# By definition --------------------------------------------------------------------------------------


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    return _affine(_standardised(input, axes, eps), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes = tuple(range(-len(tuple(normalized_shape)), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(input * torch.rsqrt(input.square().mean(axes, keepdim=True) + eps), weight, None)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    grouped = input.reshape(input.shape[0], num_groups, -1)
    return _by_channel(_standardised(grouped, (-1,), eps).reshape(input.shape), weight, bias)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if training:
        return _by_channel(_standardised(input, (0, *range(2, input.dim())), eps), weight, bias)
    if running_mean is None or running_var is None:
        raise UnsupportedError("batch_norm must have running statistics outside training, but it has none.")
    centred = input - _channels(running_mean, input)
    return _by_channel(centred * torch.rsqrt(_channels(running_var, input) + eps), weight, bias)


def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    return _by_channel(_standardised(input, tuple(range(2, input.dim())), eps), weight, bias)


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


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: int | float | None = None,
    norm_type: int | float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """A table's derivative, dense: sparse ones cannot be differentiated further, scaled ones are no derivatives."""
    return F.embedding(input, weight, padding_idx, max_norm, norm_type)


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: int | float | None = None,
    norm_type: int | float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    if max_norm is not None:
        raise UnsupportedError("embedding_bag with max_norm rewrites its own table, which has no second derivative.")
    if offsets is None:
        offsets = torch.arange(0, input.numel(), input.shape[1], device=input.device)
    elif include_last_offset:
        offsets = offsets[:-1]
    ids = input.reshape(-1)
    bag = torch.searchsorted(offsets, torch.arange(len(ids), device=ids.device), right=True) - 1
    kept = torch.ones_like(ids, dtype=torch.bool) if padding_idx is None else ids != padding_idx % len(weight)
    rows, bag = weight[ids[kept]], bag[kept]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1)[kept][:, None]
    empty = rows.new_zeros(len(offsets), rows.shape[1])
    if mode == "max":
        return empty.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax", include_self=False)
    total = empty.index_add(0, bag, rows)
    counts = torch.bincount(bag, minlength=len(offsets)).clamp_min(1).to(rows.dtype)
    return total / counts[:, None] if mode == "mean" else total


def _hardsigmoid_by_definition(input: Tensor, inplace: bool = False) -> Tensor:
    result = F.relu6(input + 3) / 6
    return input.copy_(result) if inplace else result


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    # norm_except_dim of all axes (dim -1) is not a single number to torch's forward mode.
    return v * (g / (v.norm() if dim == -1 else torch.norm_except_dim(v, 2, dim)))


_know("layer_norm", (F, torch), definition=_layer_norm)
_know("_weight_norm", (torch,), definition=_weight_norm)
_know("rms_norm", (F, torch), definition=_rms_norm)
_know("group_norm", (F, torch), definition=_group_norm)
_know("batch_norm", (F,), definition=_batch_norm)
_know("instance_norm", (F,), definition=_instance_norm)
_know("embedding", (F,), definition=_embedding)
_know("embedding_bag", (F,), definition=_embedding_bag)
_know("hardsigmoid", (F,), definition=_hardsigmoid_by_definition)
for _function, _steps in UNROLLED.items():
    _know(_function.__name__, (torch,), definition=_steps)


# Proven second derivatives --------------------------------------------------------------------------

# By the names of their nodes in autograd's graph. Each is compared with differences in tests/ops/test_proven.py. Roots
# and powers are not among them: their second derivatives may be infinite where their values are not.
PROVEN = frozenset(
    "Abs AdaptiveAvgPool2D Add Addmm AvgPool2D Baddbmm Bmm Cat Clamp ClampMin Clone Convolution Cos Div Elu Embedding "  # noqa: SIM905
    "Exp Expand Gelu LeakyRelu Log LogSoftmax Logsumexp MaxPool2DWithIndices Mean Mm Mul Neg Permute Relu ReshapeAlias "
    "Select Sigmoid Silu Sin Slice Softmax Softplus Squeeze Stack Sub Sum T Tanh Transpose Unsqueeze UnsafeView "
    "View".split()
)
