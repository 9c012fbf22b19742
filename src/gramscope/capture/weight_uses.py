"""Where weights meet data in a forward pass.

A torch function mode sees every operation, whatever module, function or operator wrote it. Each tensor is data (it
depends on the input), a weight (it depends on parameters only) or a constant. What is done where a weight meets data is
up to a subclass; nothing is replaced, and autograd's graph is that of the model itself.
"""

import types
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gramscope.base.errors import UnsupportedError
from gramscope.base.nested import map_tensors, tensors_in
from gramscope.ops.torch_calls import Args, Kwargs, TorchFunction, transforms, writes
from gramscope.ops.unrolled import UNROLLED, initial_place

_FACTORIES = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty}
# Python functions of these modules check for modes before their body; see `_with_open_body`.
_PYTHON = {"torch.nn.functional", "torch.functional", "torch._tensor"}


class WeightUses(TorchFunctionMode):
    """Calls :meth:`use` for every operation in which one of ``parameters``, or what was made of them, meets data."""

    def __init__(self, parameters: Iterable[Tensor], examples: int) -> None:
        super().__init__()
        self.examples = examples
        self._known = WeakTensorKeyDictionary(dict.fromkeys(parameters, False))  # is it data? False: a weight
        self._met: list[tuple[Tensor, int]] = []  # data that weights met, with their versions then

    def use(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """The result of an operation in which a weight meets data."""
        return func(*args, **kwargs)

    # What is known of a tensor -------------------------------------------------------------------

    def mark_data(self, value: object) -> None:
        """Every tensor in ``value`` depends on the input."""
        for tensor in tensors_in(value):
            self._known[tensor] = True

    def is_data(self, tensor: Tensor) -> bool:
        known = self._known.get(tensor)
        # What has a history that nobody saw (the result of torch.func.vjp) may depend on anything.
        return tensor.requires_grad and not tensor.is_leaf if known is None else bool(known)

    def is_weight(self, tensor: Tensor) -> bool:
        return self._known.get(tensor) is False

    # The mode itself -------------------------------------------------------------------------------

    def __torch_function__(
        self, func: TorchFunction, types_: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if _differentiating():
            return func(*args, **kwargs)
        operands = tensors_in((args, kwargs))
        data = any(map(self.is_data, operands))
        weights = torch.is_grad_enabled() and any(map(self.is_weight, operands))
        # A weight that is itself overwritten with data needs no care: autograd keeps track.
        meets = data and weights and not (writes(func) and self.is_weight(args[0]))
        output = self._meet(func, args, kwargs) if meets else func(*args, **kwargs)
        made = tensors_in((output, args[0] if writes(func) else None))
        if data or (func in _FACTORIES and isinstance(output, Tensor) and self._has_examples(output)):
            self.mark_data(made)
        elif weights:
            for tensor in made:
                if tensor.requires_grad:
                    self._known[tensor] = False
        return output

    def _has_examples(self, tensor: Tensor) -> bool:
        """A fresh zero state (n, H) is the start of a recurrence, not a constant shared by all examples."""
        return tensor.is_floating_point() and tensor.dim() > 1 and self.examples in tensor.shape[:2]

    def _meet(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if any(tensor.is_nested for tensor in tensors_in((args, kwargs))):
            raise UnsupportedError(
                "weights must multiply dense tensors, but the model applies one to a nested tensor. Pad and mask it."
            )
        if func in UNROLLED:
            return self.recurrent(func, args, kwargs)
        if isinstance(func, types.FunctionType) and func.__module__ in _PYTHON:
            with self:
                return _with_open_body(func)(*args, **kwargs)
        written = args[0] if writes(func) else None
        self.note_met(t for t in tensors_in((args, kwargs)) if t is not written and self.is_data(t))
        return self.use(func, args, kwargs)

    def note_met(self, operands: Iterable[Tensor]) -> None:
        """These must not be overwritten later."""
        self._met += [(t.detach(), t._version) for t in operands]

    def check_intact(self) -> None:
        """Raise where the model did so all the same: the operation can no longer be differentiated there."""
        if any(tensor._version != version for tensor, version in self._met):
            raise UnsupportedError(
                "what a weight is multiplied with must not change after its use, nor the weight, but the model "
                "overwrote one of them in place. Replace the in-place operation (x += y by x = x + y)."
            )

    def recurrent(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """A fused recurrent layer or cell: by its single steps, each watched. Learned first states are data."""
        place = initial_place(args)
        initial = map_tensors(lambda state: state.view_as(state), args[place])
        self.mark_data(initial)
        with self:
            return UNROLLED[func](*args[:place], initial, *args[place + 1 :], **kwargs)


def _differentiating() -> bool:
    """Inside torch.func.grad, vjp or jvp, whose graphs are no business of ours: parameters enter them as they are."""
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in transforms())


@cache
def _with_open_body(func: types.FunctionType) -> TorchFunction:
    """The same Python function with its check for modes switched off, so that its body is watched.

    ``torch.nn.functional.multi_head_attention_forward`` and its like hand the whole call to an active mode
    before they do anything. A copy with other globals goes straight to the body, and patches nothing.
    """
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    closed = {**func.__globals__, **dict.fromkeys(checks, lambda *_, **__: False)}
    clone = types.FunctionType(func.__code__, closed, func.__name__, func.__defaults__, func.__closure__)
    clone.__kwdefaults__ = func.__kwdefaults__
    return clone


def settle(tensor: Tensor) -> Tensor:
    """``tensor`` with a gradient edge that later in-place operations cannot bypass, as they can that of a view."""
    return tensor.clone() if tensor._is_view() else tensor
