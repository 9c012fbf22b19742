"""Piecewise-linear operations seen as ramps: which side of each kink a number is on, kept, replayed or smoothed.

Every such operation is a sum of ramps ``r(z) = max(z, 0)`` and of smooth terms: leaky ReLU is ``a z + (1 - a) r(z)``,
the absolute value ``2 r(z) - z``, a clamp ``lo + r(z - lo) - r(z - hi)``. What σ'' of a ramp means is a choice:

- ``Sides`` computes as torch does (σ'' = 0) and notes the side of every kink;
- ``FixedSides`` replays sides noted elsewhere: the network without crossings, polynomial in its parameters;
- ``Smoothed`` convolves each ramp with a Gaussian of standard deviation h, so that σ'' has height 1/(h√(2π)).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.kernels.written_out import unrolled, unrolled_cell

Rewrite = Callable[..., Any]
REWRITES: dict[Any, Rewrite] = {}
POOLS: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
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
# Operations with kinks or jumps whose sides are not followed. They are named in results, never passed over.
UNSEEN = {
    F.rrelu, F.hardshrink, F.threshold, torch.amax, torch.amin, Tensor.amax, Tensor.amin, torch.sort, Tensor.sort,
    torch.topk, Tensor.topk, torch.sign, Tensor.sign, torch.median, Tensor.median, torch.round, Tensor.round,
    torch.floor, Tensor.floor, torch.ceil, Tensor.ceil, torch.where, Tensor.where, torch.cummax, Tensor.cummax,
    torch.cummin, Tensor.cummin, torch.gt, torch.ge, torch.lt, torch.le, Tensor.gt, Tensor.ge, Tensor.lt, Tensor.le,
    Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__, torch.heaviside, Tensor.heaviside,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """The side of each kink in one use of an operation: positive or not, or the place of a maximum."""

    name: str
    place: Tensor


def rewrites(*functions: Any) -> Callable[[Rewrite], Rewrite]:
    def register(rewrite: Rewrite) -> Rewrite:
        for function in functions:
            REWRITES[function] = rewrite
        return rewrite

    return register


class Ramps(TorchFunctionMode):
    """Base of the three readings: turns each known operation into ramps and hands those to :meth:`ramp`."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen: list[str] = []
        self._operation = ""

    def ramp(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def pool(self, func: Any, input: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def replace(self, func: Any, rewrite: Rewrite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a known operation, written as ramps; an in-place one overwrites its argument all the same."""
        kwargs = dict(kwargs)
        in_place = kwargs.pop("inplace", False) or func.__name__.endswith("_")
        if not in_place:
            return rewrite(self, *args, **kwargs)
        return args[0].copy_(rewrite(self, args[0].clone(), *args[1:], **kwargs))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in REWRITES and _is_float(args, kwargs):
            self._operation = name.removeprefix("__").removesuffix("__").removesuffix("_")
            return self.replace(func, REWRITES[func], *_positional(args, kwargs))
        if func in POOLS:
            self._operation = name if name != "fn" else POOLS[func].__name__.removesuffix("_with_indices")
            return self._pooled(func, args, kwargs)
        if func is torch.rnn_relu:
            with self:
                return unrolled("rnn_relu", args)
        if func is torch.rnn_relu_cell:
            with self:
                return unrolled_cell(func, *args, **kwargs)
        if func in UNSEEN and _depends(args):
            self.unseen.append(name)
        return func(*args, **kwargs)

    def _pooled(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _positional(args, kwargs)
        both = kwargs.pop("return_indices", False)
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

    def replace(self, func: Any, rewrite: Rewrite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        described = {key: value for key, value in kwargs.items() if key != "inplace"}
        in_place = kwargs.get("inplace", False) or func.__name__.endswith("_")
        rewrite(self, args[0].clone() if in_place else args[0], *args[1:], **described)
        return func(*args, **kwargs)

    def pool(self, func: Any, input: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
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

    def pool(self, func: Any, input: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
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

    def pool(self, func: Any, input: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(
            f"{self._operation} has no smooth form, so kink='distributional' does not apply to it. Use kink='autograd' "
            "and look at its crossings (gs.kernels.kink_crossings), or an average pool."
        )


def _is_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first = args[0] if args else kwargs.get("input")
    return isinstance(first, Tensor) and first.is_floating_point()


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args or "input" not in kwargs:
        return args, dict(kwargs)
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    return (kwargs["input"],), rest


def _depends(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


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
def _clamp(ramps: Ramps, z: Tensor, min: Any = None, max: Any = None) -> Tensor:
    low = z if min is None else min + ramps.ramp(z - min)
    return low if max is None else low - ramps.ramp(z - max)


@rewrites(torch.clamp_min, Tensor.clamp_min, torch.clamp_min_, Tensor.clamp_min_)
def _clamp_min(ramps: Ramps, z: Tensor, min: Any) -> Tensor:
    return _clamp(ramps, z, min)


@rewrites(torch.clamp_max, Tensor.clamp_max, torch.clamp_max_, Tensor.clamp_max_)
def _clamp_max(ramps: Ramps, z: Tensor, max: Any) -> Tensor:
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


@rewrites(torch.maximum, Tensor.maximum)
def _maximum(ramps: Ramps, z: Tensor, other: Tensor) -> Tensor:
    return other + ramps.ramp(z - other)


@rewrites(torch.minimum, Tensor.minimum)
def _minimum(ramps: Ramps, z: Tensor, other: Tensor) -> Tensor:
    return z - ramps.ramp(z - other)
