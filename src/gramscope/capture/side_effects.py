"""What a measured forward pass may change besides its result, put back; and the switches it runs under.

Buffers and plain attributes of modules (counters, caches, random generators) are copied beforehand. Parameters, which
may be large, are copied when an operation is about to write into them: weights that are normalised or clamped in the
forward pass.
"""

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from gramscope.base.errors import UnsupportedError
from gramscope.base.nested import tensors_in
from gramscope.base.streams import RandomStreams, streams_put_back
from gramscope.ops.torch_calls import Args, Kwargs, TorchFunction, writes

_ONE_AT_A_TIME = threading.RLock()
# What these hold is noted; what other objects hold is left to their owner.
COLLECTIONS = (list, dict, set, deque)
Collection = list[Any] | dict[Any, Any] | set[Any] | deque[Any]


class CopyOnWrite(TorchFunctionMode):
    """Keeps the value of every parameter that an operation writes into, from before the first time.

    ``hooked``: a hook was put on a tensor. ``streams``: the random streams as they stood when it was made.
    """

    def __init__(self, parameters: Iterable[Tensor], streams: RandomStreams) -> None:
        super().__init__()
        self.streams, self.hooked = streams, False
        self._known: dict[int, list[Tensor]] = {}
        self._saved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for tensor in parameters:
            if not tensor.is_meta and not is_lazy(tensor):
                self._known.setdefault(_memory(tensor), []).append(tensor)

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        self.hooked = self.hooked or func is Tensor.register_hook
        if writes(func) or getattr(func, "__name__", "") == "__set__":
            self._save(args[:1])
        elif "out" in kwargs:
            self._save(kwargs["out"])
        return func(*args, **kwargs)

    def _save(self, written: object) -> None:
        for target in tensors_in(written):
            for tensor in self._known.get(_memory(target), ()):
                if id(tensor) not in self._saved:
                    place = tensor.data  # `tensor.data = other` puts it elsewhere in memory
                    self._saved[id(tensor)] = tensor, place, place.clone()

    def put_back(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, place, value in self._saved.values():
                if not torch.equal(place, value):
                    place.copy_(value)
                if _memory(tensor) != _memory(place):
                    tensor.data = place


def _memory(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for those that lie nowhere (inside a transform of torch.func, sparse ones)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


# Registries of nn.Module itself; of these, only the two that hold tensors are noted.
_OWN = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


def _restorer(model: nn.Module, parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Attributes and buffers of every module, and flags of parameters, as they are now."""
    noted = [put_back for module in model.modules() for put_back in _noted(module)]
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore() -> None:
        with torch.inference_mode(False), torch.no_grad():  # in this order: leaving inference mode turns gradients on
            for put_back in noted:
                put_back()
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    return restore


def _noted(module: nn.Module) -> Iterator[Callable[[], object]]:
    """How to put back numbers, tensors, generators and what collections hold."""
    tensors = [tensor for tensor in module._buffers.values() if tensor is not None]
    if getattr(module, "max_norm", None) is not None:  # a table that torch renormalises in the forward pass
        tensors += module.parameters(recurse=False)
    if isinstance(module, torch.jit.ScriptModule):
        yield from (partial(module._buffers.__setitem__, *named) for named in list(module._buffers.items()))
    else:
        attributes = vars(module)
        yield partial(_refill, attributes, dict(attributes))
        for value in (value for name, value in attributes.items() if name not in _OWN):
            if isinstance(value, COLLECTIONS):
                yield partial(_refill, value, value.copy())
            elif isinstance(value, torch.Generator):
                yield partial(value.set_state, value.get_state())
            elif isinstance(value, Tensor) and value.is_leaf:
                tensors.append(value)
    for tensor in tensors:
        if not tensor.is_meta and not is_lazy(tensor):
            yield partial(_refill_tensor, tensor, tensor.detach().clone())


def _refill_tensor(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape and not torch.equal(tensor, value):
        tensor.data.copy_(value)  # a graph of the user's that holds this tensor must not see a change


def _refill(collection: Collection, kept: Collection) -> None:
    """The same entries again, by identity; a collection that kept them is not written to."""
    if _identities(collection) == _identities(kept):
        return
    collection.clear()
    if isinstance(collection, list | deque):
        collection.extend(kept)
    else:
        collection.update(kept)


def _identities(collection: Collection) -> list[int]:
    return [*map(id, collection), *map(id, collection.values() if isinstance(collection, dict) else ())]


@contextmanager
def untouched(model: nn.Module, throughout: bool = True) -> Iterator[CopyOnWrite]:
    """Random streams, parameters, ``.grad``, buffers, plain attributes and flags after the block as before.

    Other threads that draw from torch's global stream meanwhile will draw the same numbers again. Unless
    ``throughout``, the caller enters what it is given around the model's own code, which alone may write to
    parameters: to watch for that costs some microseconds an operation.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())  # torch imports sympy on first use, which adds a filter
        # Operations without a batching rule run one direction at a time, which is as exact; nothing for a user to do.
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        # Streams and switches belong to the whole process: one measurement at a time.
        stack.enter_context(_ONE_AT_A_TIME)
        streams = stack.enter_context(streams_put_back())
        parameters = list(model.parameters())
        stack.enter_context(gradients_set_aside(parameters))
        stack.callback(_restorer(model, parameters))
        written = CopyOnWrite(parameters, streams)
        stack.callback(written.put_back)
        if throughout:
            stack.enter_context(written)
        yield written


@contextmanager
def gradients_set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """No parameter has a ``.grad`` in the block; after it each has its own again, the same tensor."""
    before = [(parameter, parameter.grad) for parameter in parameters if parameter.is_leaf]
    for parameter, gradient in before:
        if gradient is not None:
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def gradients_returned(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Backward passes in the block must return all gradients: what they add to ``.grad`` themselves would be missed."""
    leaves = [parameter for parameter in parameters if parameter.is_leaf]
    with gradients_set_aside(leaves):
        try:
            yield
        finally:
            # Whatever else went wrong: such a backward pass can often be taken only once.
            if any(leaf.grad is not None for leaf in leaves):
                raise UnsupportedError(
                    "every backward pass must return its gradients, but one of the model calls backward() and adds to "
                    "the .grad of parameters, as in reversible layers and hand-written checkpointing. These gradients "
                    "would be missing. Switch that off while you measure, or make the parameters arguments of the "
                    "autograd.Function."
                )


def checked_gradients(
    outputs: Tensor | Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Tensor | Sequence[Tensor] | None = None,
    **options: bool,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` of a backward pass that must return all gradients; None for inputs that none reaches."""
    with gradients_returned(inputs):
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)


@contextmanager
def plain_execution(fused_attention: bool = False) -> Iterator[None]:
    """Every operation in the backward graph, and differentiable in a batch.

    Gradients on; no compiled code; no encoder fast path (it hides weights), no fused attention unless asked for (it
    has no batched backward pass, and none of second order); checkpointed segments run as they stand, since their
    recomputation would not be watched.
    """
    attention = nullcontext() if fused_attention else sdpa_kernel(SDPBackend.MATH)
    with (
        _ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad(), attention, _without_checkpoints(),
        eager_execution(),
    ):  # fmt: skip
        yield


@contextmanager
def eager_execution() -> Iterator[None]:
    """No compiled code and no fused encoder layers: both pass over the modules inside them, and hide weights."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # nothing is compiled before that, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Checkpointed functions are called directly; exact, at the memory that checkpointing would have saved."""

    def run_directly(run_function: TorchFunction, preserve_rng_state: bool, *args: object) -> object:
        return run_function(*args)

    def do_nothing(*args: object, **kwargs: object) -> Iterator[None]:
        yield

    reentrant, name = checkpointing.CheckpointFunction, "_checkpoint_without_reentrant_generator"
    with ExitStack() as stack:
        if "apply" not in vars(reentrant):  # but in its base class, as long as nobody has replaced it
            stack.callback(delattr, reentrant, "apply")
        reentrant.apply = run_directly  # type: ignore[method-assign]
        if hasattr(checkpointing, name):
            stack.callback(setattr, checkpointing, name, getattr(checkpointing, name))
            setattr(checkpointing, name, do_nothing)
        yield


@contextmanager
def open_recurrences(model: nn.Module) -> Iterator[None]:
    """Recurrent layers step by step: fused ones of cuDNN and oneDNN hide their signals, and have one derivative."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with ExitStack() as stack:
        # The documented switches set more than these two.
        for library in ("cudnn", "mkldnn") if recurrent else ():
            switch = getattr(torch._C, f"_set_{library}_enabled")
            stack.callback(switch, getattr(torch._C, f"_get_{library}_enabled")())
            switch(False)
        yield


def unscale_tables(model: nn.Module) -> None:
    """Gradients of tables are derivatives, until ``untouched`` puts the flag back that divides them by frequency."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.scale_grad_by_freq = False


@contextmanager
def in_modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Train and eval flags as noted in ``modes``, and back."""
    with ExitStack() as stack:
        for module, training in modes:
            stack.callback(setattr, module, "training", module.training)
            module.training = training
        yield
