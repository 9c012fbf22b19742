"""Piecewise-linear operations seen as ramps: which side of each kink a number is on, kept, replayed or smoothed.

Every such operation is a sum of ramps ``r(z) = max(z, 0)`` and of smooth terms: leaky ReLU is ``a z + (1 - a) r(z)``,
the absolute value ``2 r(z) - z``, a clamp ``lo + r(z - lo) - r(z - hi)``, an ELU ``a ELU_1(z) + (1 - a) r(z)``. A
greatest entry is a choice of place instead. What σ'' of a ramp means is a choice:

- ``Sides`` computes as torch does (σ'' = 0) and notes the side of every kink;
- ``FixedSides`` replays sides noted elsewhere: ``r(z)`` becomes ``m z``, m the mask of there. This is the network
  without crossings, a polynomial of its parameters where all between the kinks is linear (the smooth part of a SELU is
  not, and it alone goes on as it is: the held function has no jump of slope, but is no branch of SELU continued);
- ``Smoothed`` convolves each ramp with a Gaussian of standard deviation h, so that σ'' has height 1/(h√(2π)).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.torch_calls import Args, Kwargs, TorchFunction
from gramscope.capture.unrolled import UNROLLED
from gramscope.kernels.nonsmooth_ops import Reach, decides, is_nonsmooth

Rewrite = TorchFunction  # of the ramps first, then as the operation itself
REWRITES: dict[TorchFunction, Rewrite] = {}
POOLS: dict[TorchFunction, Callable[..., tuple[Tensor, Tensor]]] = {
    F.max_pool1d: F.max_pool1d_with_indices,
    F.max_pool2d: F.max_pool2d_with_indices,
    F.max_pool3d: F.max_pool3d_with_indices,
    F.adaptive_max_pool1d: F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d: F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d: F.adaptive_max_pool3d_with_indices,
    torch.max_pool1d: F.max_pool1d_with_indices,
    torch.max_pool2d: F.max_pool2d_with_indices,
    torch.max_pool3d: F.max_pool3d_with_indices,
}
POOLS |= {function: function for function in list(POOLS.values())}
Bound = Tensor | int | float  # of a clamp
Axis = int | Sequence[int]
SELU = (1.0507009873554805, 1.6732632423543772)  # the scale and the alpha of its authors, as torch has them


@dataclass(frozen=True)
class Side:
    """The side of each kink in one use of an operation: positive or not, or the place of a maximum."""

    name: str
    place: Tensor


def rewrites(*functions: TorchFunction) -> Callable[[Rewrite], Rewrite]:
    def register(rewrite: Rewrite) -> Rewrite:
        for function in functions:
            REWRITES[function] = rewrite
        return rewrite

    return register


class Ramps(TorchFunctionMode):
    """Base of the three readings: turns each known operation into ramps and hands those to :meth:`ramp`."""

    def __init__(self) -> None:
        super().__init__()
        self.nonsmooth_ops: list[str] = []
        self._operation = ""
        self._depends = False  # whether the operation at hand depends on the parameters
        self._reach = Reach()

    def ramp(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def choose(self, z: Tensor, greatest: bool) -> Tensor:
        """The place of the greatest (or least) entry along the last axis."""
        raise NotImplementedError

    def pool(self, func: TorchFunction, input: Tensor, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def meet_nonsmooth(self, name: str) -> None:
        """An operation with kinks or jumps that are not followed."""
        self.nonsmooth_ops.append(name)

    def replace(self, func: TorchFunction, rewrite: Rewrite, args: Args, kwargs: Kwargs) -> object:
        """The result of a known operation, written as ramps; an in-place one overwrites its argument all the same.

        NotImplemented where these arguments make it something that ramps do not describe.
        """
        kwargs = dict(kwargs)
        in_place = kwargs.pop("inplace", False) or func.__name__.endswith("_")
        if not in_place:
            return rewrite(self, *args, **kwargs)
        result = rewrite(self, args[0].clone(), *args[1:], **kwargs)
        return result if result is NotImplemented else args[0].copy_(result)

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        self._depends = self._reach.has((args, kwargs))
        depends = self._depends
        result = self._met(func, args, kwargs)
        if depends:
            self._reach.follow(func, args, kwargs, result)
        return result

    def _met(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = getattr(func, "__name__", "")
        plain = name.removeprefix("__").removesuffix("__").strip("_")
        described = func in REWRITES and _is_float(args, kwargs)
        if described and kwargs.get("out") is None:
            self._operation = plain
            result = self.replace(func, REWRITES[func], *_positional(args, kwargs))
            if result is not NotImplemented:
                return result
        if func in POOLS:
            self._operation = (name if name != "fn" else POOLS[func].__name__).removesuffix("_with_indices")
            return self._pooled(func, args, kwargs)
        if func in (torch.rnn_relu, torch.rnn_relu_cell):
            with self:
                return UNROLLED[func](*args, **kwargs)
        if self._depends and (described or is_nonsmooth(func, args, kwargs, self._reach)):
            self.meet_nonsmooth(plain)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self._depends and decides(func, args, kwargs, result):
            self.meet_nonsmooth(plain)
        return result

    def _pooled(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        args, kwargs = _positional(args, kwargs)
        both = kwargs.pop("return_indices", False) or POOLS[func] is func
        values, places = self.pool(func, args[0], args[1:], kwargs)
        return (values, places) if both else values


class Sides(Ramps):
    """Torch's own arithmetic, with the side of every kink noted in ``sides``."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Side] = []
        self.heights: list[Tensor] = []  # z itself, with its graph; empty tensors for maxima

    def ramp(self, z: Tensor) -> Tensor:
        self.sides.append(Side(self._operation, z.detach() > 0))
        self.heights.append(z)
        return z

    def replace(self, func: TorchFunction, rewrite: Rewrite, args: Args, kwargs: Kwargs) -> object:
        described = {key: value for key, value in kwargs.items() if key != "inplace"}
        in_place = kwargs.get("inplace", False) or func.__name__.endswith("_")
        written = rewrite(self, args[0].clone() if in_place else args[0], *args[1:], **described)
        return written if written is NotImplemented else func(*args, **kwargs)

    def choose(self, z: Tensor, greatest: bool) -> Tensor:
        places = _extreme_place(z, greatest)
        self.sides.append(Side(self._operation, places))
        self.heights.append(z.new_zeros(0))
        return places

    def pool(self, func: TorchFunction, input: Tensor, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        values, places = POOLS[func](input, *args, **kwargs)
        self.sides.append(Side(self._operation, places.detach()))
        self.heights.append(values.new_zeros(0))
        return values, places


class FixedSides(Ramps):
    """Every kink stays on the side it had in another run of the same network."""

    def __init__(self, sides: list[Side]) -> None:
        super().__init__()
        self._sides = iter(sides)

    def ramp(self, z: Tensor) -> Tensor:
        return self._next(z.shape).place.to(z.dtype) * z

    def choose(self, z: Tensor, greatest: bool) -> Tensor:
        return self._next(z.shape[:-1]).place

    def pool(self, func: TorchFunction, input: Tensor, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        side = self._next(None)
        spatial = side.place.dim() - 2 if input.dim() == side.place.dim() and input.dim() > 2 else side.place.dim() - 1
        spatial = {"1d": 1, "2d": 2, "3d": 3}.get(self._operation[-2:], spatial)
        flat, places = input.flatten(-spatial), side.place.flatten(-spatial)
        return flat.gather(-1, places).reshape(side.place.shape), side.place

    def _next(self, shape: torch.Size | None) -> Side:
        side = next(self._sides, None)
        if side is None or side.name != self._operation or (shape is not None and side.place.shape != shape):
            raise InputError(
                "the network must run the same operations before and after the step, but a "
                f"{self._operation} has no counterpart. Its control flow depends on its parameters; crossings "
                "cannot be attributed to it."
            )
        return side


class Smoothed(Ramps):
    """``r_h(z) = z Φ(z/h) + h φ(z/h)``: the ramp convolved with a Gaussian, so that ``r_h'' = φ(z/h)/h``."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__()
        self.bandwidth = bandwidth

    def ramp(self, z: Tensor) -> Tensor:
        h = self.bandwidth
        return z * torch.special.ndtr(z / h) + (h / math.sqrt(2 * math.pi)) * torch.exp(-0.5 * (z / h) ** 2)

    def choose(self, z: Tensor, greatest: bool) -> Tensor:
        if self._depends:
            self.meet_nonsmooth(self._operation)
        return _extreme_place(z, greatest)

    def pool(self, func: TorchFunction, input: Tensor, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        if self._depends:
            self.meet_nonsmooth(self._operation)
        return POOLS[func](input, *args, **kwargs)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        # At the end and not at once: torch takes an error inside ``z > 0`` for a comparison it cannot make.
        if error is None and self.nonsmooth_ops:
            raise UnsupportedError(
                f"{', '.join(dict.fromkeys(self.nonsmooth_ops))} has no smooth form, so kink='distributional' does not "
                "apply to it. Use kink='autograd' and look at its crossings (gs.kernels.kink_crossings), or write it "
                "in smooth operations, ReLUs, clamps, and maxima of two tensors; for a max pool take an average pool."
            )


def _is_float(args: Args, kwargs: Kwargs) -> bool:
    first = args[0] if args else kwargs.get("input")
    return isinstance(first, Tensor) and first.is_floating_point()


def _positional(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with the tensor in its place and in torch's own words, not numpy's."""
    same = {"axis": "dim", "keepdims": "keepdim"}
    rest = {same.get(key, key): value for key, value in kwargs.items() if key != "out"}
    return (args, rest) if args or "input" not in rest else ((rest.pop("input"),), rest)


def _extreme_place(z: Tensor, greatest: bool) -> Tensor:
    return z.detach().argmax(-1) if greatest else z.detach().argmin(-1)


@rewrites(F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, F.relu_)
def _relu(ramps: Ramps, z: Tensor) -> Tensor:
    return ramps.ramp(z)


@rewrites(F.leaky_relu, F.leaky_relu_)
def _leaky_relu(ramps: Ramps, z: Tensor, negative_slope: float = 0.01) -> Tensor:
    return negative_slope * z + (1 - negative_slope) * ramps.ramp(z)


@rewrites(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(ramps: Ramps, z: Tensor, weight: Tensor) -> Tensor:
    slope = weight.reshape(-1, *(1,) * (z.dim() - 2)) if weight.numel() > 1 and z.dim() > 2 else weight
    return slope * z + (1 - slope) * ramps.ramp(z)


@rewrites(torch.abs, Tensor.abs, Tensor.__abs__, torch.abs_, Tensor.abs_, torch.absolute, Tensor.absolute)
def _abs(ramps: Ramps, z: Tensor) -> Tensor:
    return 2 * ramps.ramp(z) - z


@rewrites(F.hardtanh, F.hardtanh_)
def _hardtanh(ramps: Ramps, z: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return min_val + ramps.ramp(z - min_val) - ramps.ramp(z - max_val)


@rewrites(F.relu6)
def _relu6(ramps: Ramps, z: Tensor) -> Tensor:
    return ramps.ramp(z) - ramps.ramp(z - 6.0)


@rewrites(torch.clamp, Tensor.clamp, torch.clamp_, Tensor.clamp_, torch.clip, Tensor.clip, Tensor.clip_, torch.clip_)
def _clamp(ramps: Ramps, z: Tensor, min: Bound | None = None, max: Bound | None = None) -> Tensor:
    low = z if min is None else min + ramps.ramp(z - min)
    return low if max is None else low - ramps.ramp(z - max)


@rewrites(torch.clamp_min, Tensor.clamp_min, torch.clamp_min_, Tensor.clamp_min_)
def _clamp_min(ramps: Ramps, z: Tensor, min: Bound) -> Tensor:
    return _clamp(ramps, z, min)


@rewrites(torch.clamp_max, Tensor.clamp_max, torch.clamp_max_, Tensor.clamp_max_)
def _clamp_max(ramps: Ramps, z: Tensor, max: Bound) -> Tensor:
    return _clamp(ramps, z, None, max)


@rewrites(F.hardsigmoid)
def _hardsigmoid(ramps: Ramps, z: Tensor) -> Tensor:
    return (ramps.ramp(z + 3) - ramps.ramp(z - 3)) / 6


@rewrites(F.hardswish)
def _hardswish(ramps: Ramps, z: Tensor) -> Tensor:
    return z * _hardsigmoid(ramps, z)


@rewrites(F.softshrink)
def _softshrink(ramps: Ramps, z: Tensor, lambd: float = 0.5) -> Tensor:
    return ramps.ramp(z - lambd) - ramps.ramp(-z - lambd)


@rewrites(F.elu, F.elu_)
def _elu(ramps: Ramps, z: Tensor, alpha: float = 1.0) -> Tensor:
    # With alpha = 1 the slope is continuous; with any other it jumps by 1 - alpha at zero.
    return F.elu(z) if alpha == 1 else alpha * F.elu(z) + (1 - alpha) * ramps.ramp(z)


@rewrites(F.selu, torch.selu, F.selu_, torch.selu_)
def _selu(ramps: Ramps, z: Tensor) -> Tensor:
    scale, alpha = SELU
    return scale * _elu(ramps, z, alpha)


@rewrites(F.rrelu, torch.rrelu, F.rrelu_, torch.rrelu_)
def _rrelu(ramps: Ramps, z: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> object:
    return NotImplemented if training else _leaky_relu(ramps, z, (lower + upper) / 2)  # slopes drawn at random


@rewrites(F.threshold, torch.threshold, torch.threshold_)
def _threshold(ramps: Ramps, z: Tensor, threshold: float, value: float) -> object:
    return NotImplemented if threshold != value else value + ramps.ramp(z - threshold)  # else it jumps


@rewrites(torch.maximum, Tensor.maximum, torch.fmax, Tensor.fmax)
def _maximum(ramps: Ramps, z: Tensor, other: Tensor) -> Tensor:
    return other + ramps.ramp(z - other)


@rewrites(torch.minimum, Tensor.minimum, torch.fmin, Tensor.fmin)
def _minimum(ramps: Ramps, z: Tensor, other: Tensor) -> Tensor:
    return z - ramps.ramp(z - other)


@rewrites(torch.max, Tensor.max)
def _max(
    ramps: Ramps, z: Tensor, other: Tensor | int | None = None, keepdim: bool = False, *, dim: int | None = None
) -> object:
    if isinstance(other, Tensor):
        return _maximum(ramps, z, other)
    return _with_places(torch.return_types.max, ramps, z, other if dim is None else dim, keepdim)


@rewrites(torch.min, Tensor.min)
def _min(
    ramps: Ramps, z: Tensor, other: Tensor | int | None = None, keepdim: bool = False, *, dim: int | None = None
) -> object:
    if isinstance(other, Tensor):
        return _minimum(ramps, z, other)
    return _with_places(torch.return_types.min, ramps, z, other if dim is None else dim, keepdim)


@rewrites(torch.amax, Tensor.amax)
def _amax(ramps: Ramps, z: Tensor, dim: Axis = (), keepdim: bool = False) -> Tensor:
    return _extreme(ramps, z, dim, keepdim, greatest=True)[0]


@rewrites(torch.amin, Tensor.amin)
def _amin(ramps: Ramps, z: Tensor, dim: Axis = (), keepdim: bool = False) -> Tensor:
    return _extreme(ramps, z, dim, keepdim, greatest=False)[0]


def _with_places(both: TorchFunction, ramps: Ramps, z: Tensor, dim: int | None, keepdim: bool) -> object:
    """As ``torch.max`` and ``torch.min`` answer: values alone over all axes, values and places over one."""
    found = _extreme(ramps, z, dim, keepdim, greatest=both is torch.return_types.max)
    return found[0] if dim is None else both(found)


def _extreme(ramps: Ramps, z: Tensor, dim: Axis | None, keepdim: bool, greatest: bool) -> tuple[Tensor, Tensor]:
    """The greatest (or least) entries over some axes, all if none is named, and their places."""
    if z.dim() == 0:
        return z, torch.zeros_like(z, dtype=torch.int64)
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(z.dim()))
    axes = sorted(axis % z.dim() for axis in given)
    last = z.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes))
    places = ramps.choose(last, greatest)
    values = last.gather(-1, places[..., None])[..., 0]
    if keepdim:
        shape = [1 if axis in axes else size for axis, size in enumerate(z.shape)]
        values, places = values.reshape(shape), places.reshape(shape)
    return values, places
