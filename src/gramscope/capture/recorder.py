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
from gramscope.capture.graph import settle
from gramscope.capture.tape import Tape
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
    entries: int  # of the signal, for one direction
    guards: tuple[tuple[Tensor, int], ...]  # data that entered, with its version then
    doubtful: bool = False  # the data may be a constant after all, see ``Recorder.doubtful``

    def inputs_intact(self) -> bool:
        """Nothing overwrote the inputs after this use; autograd itself would refuse a weight gradient otherwise."""
        return all(tensor._version == version for tensor, version in self.guards)


class Demand:
    """What backward passes of our own must give: signals always, weight gradients only to the fallback."""

    weight_gradients = False
    directions = 1


class Recorder(TorchFunctionMode):
    """Records the uses of ``parameters`` while it is active."""

    def __init__(self, parameters: Mapping[str, Tensor], examples: int, refuse_coupled: bool, tf32: bool) -> None:
        super().__init__()
        self.examples = examples
        self.tf32 = tf32
        self.hint = ""  # what else may be wrong, for error messages
        self.is_coupled: Callable[[], bool] = lambda: True  # does an example's output depend on the others?
        self.demand = Demand()
        self._guards: tuple[tuple[Tensor, int], ...] = ()
        self._in_doubt = False
        self._doubts: dict[int, Any] = {}
        self.refuse_coupled = refuse_coupled
        self.uses: list[Use] = []
        self.tape = Tape(examples)
        self.coarsest = torch.float64  # the least precise dtype that data had on its way
        self._facts: dict[int, tuple[Any, Weight | None]] = {}
        self._keep = list(parameters.values())
        for parameter in self._keep:
            self._facts[id(parameter)] = (weakref.ref(parameter), Weight.of_parameter(parameter))

    # What is known of a tensor -------------------------------------------------------------------

    def mark_data(self, value: Any, doubtful: bool = False) -> None:
        """Every tensor in ``value`` depends on the input."""
        for tensor in tensors_in(value):
            self._facts[id(tensor)] = (weakref.ref(tensor), None)
            self._doubts[id(tensor)] = weakref.ref(tensor) if doubtful else None
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(self.coarsest).eps:
                self.coarsest = tensor.dtype

    def is_data(self, value: Any) -> bool:
        return any(self._fact(tensor) is None for tensor in tensors_in(value))

    def doubtful(self, operands: list[Tensor]) -> bool:
        """Are these data only because fresh zeros with as many rows as examples may be the start of a recurrence?"""
        found = [self._doubts.get(id(t)) for t in operands if self._fact(t) is None]
        return all(ref is not None and ref() is not None for ref in found)

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
            self.uses.append(Use(weight, leaf, edge, form, output.numel(), self._guards, self._in_doubt))

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
        held = self.tape.held(operands)
        noted = len(self.uses)
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
            self._in_doubt = self.doubtful(operands)
            output = self._meet(func, args, kwargs)
        if data or (func in _FACTORIES and self._has_examples(output)):
            doubtful = self.doubtful(operands)
            self.mark_data(output, doubtful)
            if writes(func):
                self.mark_data(args[0], doubtful)
        if held and self._tapeable(output, operands, held, weights, self.uses[noted:]):
            self.tape.record(output, func, args, kwargs, tuple(self.uses[noted:]), held)
        return output

    def _tapeable(
        self, output: Any, operands: list[Tensor], held: frozenset[int], weights: list[Weight], uses: list[Use]
    ) -> bool:
        """Operands that carry a gradient are on the tape, or weights whose use was noted at this very output."""
        moving = [t for t in operands if t.requires_grad]
        known = all(id(t) in held or self.weight(t) is not None for t in moving)
        attached = not moving or all(t.requires_grad for t in tensors_in(output))
        noted = {id(weight) for weight in weights} == {id(use.weight) for use in uses}
        return known and attached and noted and (not uses or _made(output, uses))

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


def _made(output: Any, uses: list[Use]) -> bool:
    """The signals of all these uses are the one at ``output``."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return False  # a comparison, say
    edge = get_gradient_edge(output)
    return all((edge.node, edge.output_nr) == (use.edge.node, use.edge.output_nr) for use in uses)


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
