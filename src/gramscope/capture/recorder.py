"""The recorder: watches one forward pass and notes where weights meet data.

It is a torch function mode, so it sees every operation whatever module, function or operator wrote it.
Each tensor is data (it depends on the input), a weight (it depends on parameters only) or a constant.
Where a weight meets data, a leaf stands in for it: the autograd graph of the output then ends at these
leaves, a backward pass computes signals and no weight gradients, and the user's parameters see nothing.
"""

import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from gramscope.base.errors import UnsupportedError
from gramscope.base.nested import map_tensors, tensors_in
from gramscope.capture.forms import Form, Tap
from gramscope.capture.weights import Weight

Rule = Callable[..., Any]
RULES: dict[Callable[..., Any], Rule] = {}

# Python functions of these modules check for modes before their body; see `opened`.
_FACTORIES = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty}
PYTHON_ROOMS = {"torch.nn.functional", "torch.functional", "torch._tensor"}


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions: ``rule(recorder, func, *args, **kwargs) -> output``."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


@dataclass(frozen=True, eq=False)
class Use:
    """One meeting of a weight with data: its stand-in, the edge that carries its signal, and its form."""

    weight: Weight
    leaf: Tensor
    edge: GradientEdge
    form: Form
    guards: tuple[tuple[Tensor, int], ...]  # data that entered, with its version then

    def inputs_intact(self) -> bool:
        """Nothing overwrote the inputs after this use; autograd itself would refuse a weight gradient otherwise."""
        return all(tensor._version == version for tensor, version in self.guards)


class Recorder(TorchFunctionMode):
    """Records the uses of ``parameters`` while it is active."""

    def __init__(self, parameters: Mapping[str, Tensor], examples: int) -> None:
        super().__init__()
        self.examples = examples
        self._guards: tuple[tuple[Tensor, int], ...] = ()
        self.uses: list[Use] = []
        self._facts: dict[int, tuple[Any, Weight | None]] = {}
        self._keep = list(parameters.values())
        for parameter in self._keep:
            self._facts[id(parameter)] = (weakref.ref(parameter), Weight.of_parameter(parameter))

    # What is known of a tensor -------------------------------------------------------------------

    def mark_data(self, value: Any) -> None:
        """Every tensor in ``value`` depends on the input."""
        for tensor in tensors_in(value):
            self._facts[id(tensor)] = (weakref.ref(tensor), None)

    def is_data(self, value: Any) -> bool:
        return any(self._fact(tensor) is None for tensor in tensors_in(value))

    def weight(self, value: Any) -> Weight | None:
        """The weight that ``value`` is, or None for data, constants and anything that is no tensor."""
        if not isinstance(value, Tensor):
            return None
        fact = self._fact(value)
        return fact if isinstance(fact, Weight) else None

    def weights_in(self, value: Any) -> list[Weight]:
        return [w for tensor in tensors_in(value) if (w := self.weight(tensor)) is not None]

    def _fact(self, tensor: Tensor) -> Weight | bool | None:
        """A Weight; None for data; False for a constant."""
        if self._known(tensor):
            return self._facts[id(tensor)][1]
        # What has a history that nobody saw (the result of torch.func.vjp) may depend on anything.
        return None if tensor.requires_grad and not tensor.is_leaf else False

    def _known(self, tensor: Tensor) -> bool:
        entry = self._facts.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    # Recording -------------------------------------------------------------------------------------

    def stand_in(self, value: Any) -> Any:
        """A fresh leaf for a weight, anything else unchanged."""
        weight = self.weight(value)
        return value if weight is None else weight.tensor.detach().requires_grad_()

    def settle(self, output: Tensor) -> Tensor:
        return settle(output)

    def note(self, value: Any, leaf: Any, output: Tensor, form: Form) -> None:
        """Record that the weight ``value`` (or its tensor), as ``leaf``, made ``output`` in the way of ``form``."""
        weight = value if isinstance(value, Weight) else self.weight(value)
        if weight is not None and output.requires_grad:
            edge = get_gradient_edge(output)
            self.uses.append(Use(weight, leaf, edge, form, self._guards))

    def tap(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The rule for anything else: take the gradient at the weight itself."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def swap(tensor: Tensor) -> Tensor:
            leaf: Tensor = self.stand_in(tensor)
            if leaf is not tensor:
                pairs.append((tensor, leaf))
            return leaf

        args, kwargs = map_tensors(swap, args), map_tensors(swap, kwargs)
        output = func(*args, **kwargs)
        for tensor, leaf in pairs:
            weight = self.weight(tensor)
            assert weight is not None
            self.note(tensor, leaf, leaf, Tap(shape=tuple(leaf.shape), copies=weight.copies))
        return output

    def enter(self, value: Tensor) -> Tensor:
        """``value`` as data: a weight (a learned initial state) is tapped, a constant becomes data."""
        weight = self.weight(value)
        if weight is not None:
            leaf: Tensor = self.stand_in(value)
            self.note(value, leaf, leaf, Tap(shape=tuple(leaf.shape), copies=weight.copies))
            value = leaf
        self.mark_data(value)
        return value

    # The mode itself -------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types_: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _differentiating():
            return func(*args, **kwargs)
        operands = tensors_in((args, kwargs))
        facts = [self._fact(tensor) for tensor in operands]
        weights = [fact for fact in facts if isinstance(fact, Weight)] if torch.is_grad_enabled() else []
        data = None in facts
        if not weights:
            output = func(*args, **kwargs)
        elif not data:
            output = func(*args, **kwargs)
            if writes(func):
                self._rewrite(args[0], weights)
            self._derive(func, weights, output)
            return output
        elif writes(func) and self.weight(args[0]) is not None:
            output = func(*args, **kwargs)  # the weight itself is overwritten: autograd keeps track
            self.mark_data(args[0])
        else:
            output = self._meet(func, args, kwargs)
        if data or (func in _FACTORIES and self._has_examples(output)):
            self.mark_data(output)
            if writes(func):
                self.mark_data(args[0])
        return output

    def _has_examples(self, tensor: Tensor) -> bool:
        """A fresh zero state (n, H) is the start of a recurrence, not a constant shared by all examples."""
        return tensor.is_floating_point() and tensor.dim() > 1 and self.examples in tensor.shape[:2]

    def _meet(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        known = RULES.get(func)
        written = args[:1] if writes(func) else ()
        data = [t for t in tensors_in((args, kwargs)) if self._fact(t) is None]
        if any(tensor.is_nested for tensor in data):
            raise UnsupportedError(
                "weights must meet dense tensors, but the model applies one to a nested tensor. Pad and mask it."
            )
        self._guards = tuple((t.detach(), t._version) for t in data if not any(t is w for w in written))
        if known is not None:
            return known(self, func, *args, **kwargs)
        if isinstance(func, types.FunctionType) and func.__module__ in PYTHON_ROOMS:
            with self:
                return opened(func)(*args, **kwargs)
        return self.tap(func, args, kwargs)

    def _rewrite(self, written: Tensor, weights: list[Weight]) -> None:
        """A tensor made of weights was overwritten in place: it, and all that shares its memory, is another weight."""
        memory = written.untyped_storage().data_ptr()
        known = [(t, fact) for ref, fact in list(self._facts.values()) if (t := ref()) is not None]
        sharing = [(t, fact) for t, fact in known if fact is not None and t.untyped_storage().data_ptr() == memory]
        if any(use.weight.tensor.untyped_storage().data_ptr() == memory for use in self.uses):
            raise UnsupportedError(
                "a weight must stay as it is once it was used, but the model overwrites a tensor made of "
                "parameters after it met data. Write into a copy (w = w.clone()) before, not after."
            )
        roots = {id(root): root for weight in weights for root in weight.roots}
        for tensor, fact in (*sharing, (written, weights[0])):
            if tensor.requires_grad:
                mine = {id(root): root for root in fact.roots} | roots
                self._facts[id(tensor)] = (weakref.ref(tensor), Weight(tensor, tuple(mine.values()), None))
                self._keep.append(tensor)

    def _derive(self, func: Callable[..., Any], weights: list[Weight], output: Any) -> None:
        name = getattr(func, "__name__", "")
        for tensor in tensors_in(output):
            if tensor.requires_grad and not self._known(tensor):
                derived = weights[0].derive(tensor, tuple(weights[1:]), name)
                self._facts[id(tensor)] = (weakref.ref(tensor), derived)
                self._keep.append(tensor)


@cache
def writes(func: Callable[..., Any]) -> bool:
    """An operation that overwrites its first argument, by its name."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"})
    )


def _differentiating() -> bool:
    """Inside torch.func.grad, vjp or jvp, whose graphs are no business of ours: parameters enter them as they are."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    stack = torch._C._functorch.get_interpreter_stack()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack or ())


_OPENED: dict[Callable[..., Any], Callable[..., Any]] = {}


def opened(func: types.FunctionType) -> Callable[..., Any]:
    """The same Python function with its check for modes switched off, so that its body is watched.

    ``torch.nn.functional.multi_head_attention_forward`` and its like hand the whole call to an active mode
    before they do anything. A copy with other globals goes straight to the body, and patches nothing.
    """
    if func not in _OPENED:
        closed = dict.fromkeys(
            ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
            lambda *_, **__: False,
        )
        clone = types.FunctionType(
            func.__code__, {**func.__globals__, **closed}, func.__name__, func.__defaults__, func.__closure__
        )
        clone.__kwdefaults__ = func.__kwdefaults__
        _OPENED[func] = clone
    return _OPENED[func]


class _Alias(torch.autograd.Function):
    """The same memory under a new node that is no view, so that in-place operations append to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def settle(tensor: Tensor) -> Tensor:
    """``tensor`` with a gradient edge that later in-place operations cannot bypass."""
    return _Alias.apply(tensor) if tensor._is_view() else tensor  # type: ignore[no-untyped-call]
