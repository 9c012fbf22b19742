"""Everything around a measured forward pass that must be as it was afterwards, and the switches it runs under."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from gramscope.base.streams import streams_put_back
from gramscope.capture.kept import CopyOnWrite, restorer_of_attributes

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def untouched(model: nn.Module, throughout: bool = True) -> Iterator[CopyOnWrite]:
    """Random streams, parameters, buffers, plain attributes and flags after the block as before, also after an error.

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
        stack.enter_context(streams_put_back())
        stack.callback(_restorer_of_state(model))
        stack.callback(restorer_of_attributes(model))
        written = CopyOnWrite(model)
        stack.callback(written.put_back)
        if throughout:
            stack.enter_context(written)
        yield written


def _restorer_of_state(model: nn.Module) -> Any:
    """Buffers, and tables that torch renormalises in the forward pass (embeddings with max_norm)."""
    held: list[tuple[dict[str, Any], str, Tensor, Tensor, Callable[[], bool]]] = []
    for module in model.modules():
        owners: list[dict[str, Any]] = [module._buffers]
        if getattr(module, "max_norm", None) is not None:
            owners.append(module._parameters)
        for owner in owners:
            for name, tensor in owner.items():
                if tensor is not None and not tensor.is_meta and not is_lazy(tensor):
                    value = tensor.detach().clone()
                    held.append((owner, name, tensor, value, partial(_changed, tensor, value, tensor._version, module)))
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    names = [(module._buffers, frozenset(module._buffers)) for module in plain]

    def restore() -> None:
        with torch.inference_mode(False), torch.no_grad():  # in this order: leaving inference mode turns gradients on
            for owner, name, tensor, value, changed in held:
                owner[name] = tensor
                if changed():
                    tensor.copy_(value)
        for buffers, known in names:
            for name in set(buffers) - known:
                del buffers[name]
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    return restore


def _changed(tensor: Tensor, value: Tensor, version: int, module: nn.Module) -> bool:
    """Batch norm writes its statistics without counting it as a change, so in training the values are compared."""
    return tensor._version != version or (module.training and not torch.equal(tensor, value))


@contextmanager
def plain_execution(fused_attention: bool = False) -> Iterator[None]:
    """Every operation in the backward graph, and differentiable in a batch.

    Gradients on; no compiled code; no encoder fast path (it hides weights), no fused attention unless asked for (it
    has no batched backward pass, and none of second order); checkpointed segments run as they stand, since their
    recomputation would not be watched.
    """
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        fast_path = torch.backends.mha.get_fastpath_enabled()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if not fused_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if "torch._dynamo" in sys.modules:  # nothing is compiled before that, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_checkpoints())
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Checkpointed functions are called directly; exact, at the memory that checkpointing would have saved."""

    def run_directly(run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        return run_function(*args)

    def do_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    reentrant, name = checkpointing.CheckpointFunction, "_checkpoint_without_reentrant_generator"
    generator = getattr(checkpointing, name, None)
    had_own = "apply" in reentrant.__dict__
    reentrant.apply = run_directly  # type: ignore[method-assign]
    if generator is not None:
        setattr(checkpointing, name, do_nothing)
    try:
        yield
    finally:
        if not had_own:
            del reentrant.apply
        if generator is not None:
            setattr(checkpointing, name, generator)


@contextmanager
def in_modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Train and eval flags as noted in ``modes``, and back."""
    now = [(module, module.training) for module, _ in modes]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in now:
            module.training = training
