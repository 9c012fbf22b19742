"""A network run with its operations in other words: kinks noted, held or smoothed, and no fused derivatives.

Every piecewise-linear operation is written in ramps ``r(z) = max(z, 0)`` (``gramscope.ops.operations``). What σ'' of a
ramp means is a choice:

- ``Sides`` computes as torch does (σ'' = 0) and notes the side of every kink;
- ``FixedSides`` replays sides noted elsewhere: ``r(z)`` becomes ``m z``, m the mask of there. This is the network
  without crossings, a polynomial of its parameters where all between the kinks is linear (the smooth part of a SELU is
  not, and it alone goes on as it is: the held function has no jump of slope, but is no branch of SELU continued);
- ``Smoothed`` convolves each ramp with a Gaussian of standard deviation h, so that σ'' has height 1/(h√(2π)).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.nested import tensors_in
from gramscope.ops.operations import OPERATIONS, Operation, Ramps
from gramscope.ops.torch_calls import Args, Kwargs, TorchFunction, inside_vmap, transforms, writes

# Tests for faults, not decisions that a network takes.
HARMLESS = {"isnan", "isinf", "isfinite", "isposinf", "isneginf", "isreal"}
RECURRENT_RELUS = {torch.rnn_relu, torch.rnn_relu_cell}
NOTHING_KNOWN = Operation("")


class TwiceDifferentiable(TorchFunctionMode):
    """Operations whose higher derivatives torch gets wrong, or does not have, by their definition."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        known = OPERATIONS.get(func)
        return (func if known is None else known.definition or func)(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Side:
    """The side of each kink in one use of an operation: positive or not, or the place of a maximum."""

    name: str
    place: Tensor


class Reading(TorchFunctionMode, Ramps):
    """Writes each known operation in ramps and places; subclasses say what these are."""

    exact = False  # whether results are torch's own, and the ramps only looked at
    carries = False  # whether sides are carried from one run to another: those inside torch.vmap cannot leave it

    def __init__(self) -> None:
        super().__init__()
        self.nonsmooth_ops: list[str] = []  # operations with kinks or jumps that are not followed
        self._operation = ""
        self._depends = False  # whether the operation at hand depends on the parameters
        self._reach = Reach()
        self._around = len(transforms())

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        depends = self._depends = self._reach.has((args, kwargs))
        result = self._result(func, args, kwargs)
        if depends:
            self._reach.follow(func, args, result)
        return result

    def _result(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        known, depends = OPERATIONS.get(func, NOTHING_KNOWN), self._depends
        self._operation = known.name or getattr(func, "__name__", "").strip("_")
        rewrite = known.as_ramps if _is_float(args, kwargs) else None
        if rewrite is not None and kwargs.get("out") is None and not (self.carries and inside_vmap(self._around)):
            result = self._in_ramps(func, rewrite, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in RECURRENT_RELUS:
            with self:
                return OPERATIONS[func].definition(*args, **kwargs)  # type: ignore[misc]  # these have one
        result = func(*args, **kwargs)
        if depends and (
            rewrite or known.has_kinks(args, kwargs, self._reach.has) or _decides(func, args, kwargs, result)
        ):
            self.nonsmooth_ops.append(self._operation)
        return result

    def _in_ramps(self, func: TorchFunction, rewrite: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """The result of a known operation; one that works in place overwrites its argument all the same."""
        (z, *rest), options = _positional(args, kwargs)
        in_place = options.pop("inplace", False) or writes(func)
        written = rewrite(self, z.clone() if in_place else z, *rest, **options)
        if written is NotImplemented:
            return written
        if self.exact:
            return func(*args, **kwargs)
        return z.copy_(written) if in_place else written


class Sides(Reading):
    """Torch's own arithmetic, with the side of every kink noted in ``sides``."""

    exact = carries = True

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Side] = []
        self.heights: list[Tensor] = []  # z itself, with its graph; empty tensors for maxima

    def ramp(self, z: Tensor) -> Tensor:
        self.sides.append(Side(self._operation, z.detach() > 0))
        self.heights.append(z)
        return z

    def place(self, find: Callable[[], Tensor]) -> Tensor:
        places = find().detach()
        self.sides.append(Side(self._operation, places))
        self.heights.append(torch.zeros(0, device=places.device))
        return places


class FixedSides(Reading):
    """Every kink stays on the side it had in another run of the same network."""

    carries = True

    def __init__(self, sides: Iterable[Side]) -> None:
        super().__init__()
        self._sides = iter(sides)

    def ramp(self, z: Tensor) -> Tensor:
        return self._next(z.shape).to(z.dtype) * z

    def place(self, find: Callable[[], Tensor]) -> Tensor:
        return self._next(None)

    def _next(self, shape: torch.Size | None) -> Tensor:
        side = next(self._sides, None)
        if side is None or side.name != self._operation or (shape is not None and side.place.shape != shape):
            raise InputError(
                "the network must run the same operations before and after the step, but a "
                f"{self._operation} has no counterpart. Its control flow depends on its parameters; crossings "
                "cannot be attributed to it."
            )
        return side.place


class Smoothed(Reading):
    """``r_h(z) = z Φ(z/h) + h φ(z/h)``: the ramp convolved with a Gaussian, so that ``r_h'' = φ(z/h)/h``."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__()
        self.bandwidth = bandwidth

    def ramp(self, z: Tensor) -> Tensor:
        h = self.bandwidth
        return z * torch.special.ndtr(z / h) + (h / math.sqrt(2 * math.pi)) * torch.exp(-0.5 * (z / h) ** 2)

    def place(self, find: Callable[[], Tensor]) -> Tensor:
        if self._depends:
            self.nonsmooth_ops.append(self._operation)
        return find()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        # At the end and not at once: torch takes an error inside ``z > 0`` for a comparison it cannot make.
        if error is None and self.nonsmooth_ops:
            raise UnsupportedError(
                f"{', '.join(dict.fromkeys(self.nonsmooth_ops))} has no smooth form, so kink='distributional' does not "
                "apply to it. Use kink='autograd' and look at its crossings (gs.kernels.kink_crossings), or write it "
                "in smooth operations, ReLUs, clamps, and maxima of two tensors; for a max pool take an average pool."
            )


class Reach:
    """What depends on the parameters: through the graph, and beyond it where a model detaches or decides."""

    def __init__(self) -> None:
        self._cut = WeakTensorKeyDictionary()

    def has(self, value: object) -> bool:
        return any(tensor.requires_grad or tensor in self._cut for tensor in tensors_in(value))

    def follow(self, func: TorchFunction, args: Args, result: object) -> None:
        """Note what a call with dependent arguments made outside the graph."""
        name = getattr(func, "__name__", "")
        if _only_shapes(name) or (name.endswith("_as") and not self.has(args[:1])):
            return
        for tensor in tensors_in(result):
            if not tensor.requires_grad:
                self._cut[tensor] = True


def _decides(func: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> bool:
    """Whether numbers became whole numbers or truth values, as by ``z > 0``, ``argmax``, ``bucketize`` or ``long``."""
    name = getattr(func, "__name__", "")
    if name in HARMLESS or _only_shapes(name):
        return False
    return all(map(_is_smooth, tensors_in((args, kwargs)))) and not all(map(_is_smooth, tensors_in(result)))


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _only_shapes(name: str) -> bool:
    """Whether an operation takes only the shape and type of its argument."""
    return "_like" in name or name.startswith("new_")


def _is_float(args: Args, kwargs: Kwargs) -> bool:
    first = args[0] if args else kwargs.get("input")
    return isinstance(first, Tensor) and first.is_floating_point()


def _positional(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with the tensor in its place and in torch's own words, not numpy's."""
    same = {"axis": "dim", "keepdims": "keepdim"}
    rest = {same.get(key, key): value for key, value in kwargs.items() if key != "out"}
    return (args, rest) if args or "input" not in rest else ((rest.pop("input"),), rest)
