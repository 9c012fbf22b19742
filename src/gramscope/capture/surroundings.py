"""Everything around a measured forward pass that must be as it was afterwards, and the switches it runs under."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Random streams, buffers and requires_grad flags are the same after the block as before, also after an error."""
    with ExitStack() as stack:
        stack.callback(_restorer_of_random_streams())
        stack.callback(_restorer_of_state(model))
        yield


def _restorer_of_random_streams() -> Any:
    cpu, python, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _restorer_of_state(model: nn.Module) -> Any:
    """Buffers, and tables that torch renormalises in the forward pass (embeddings with max_norm)."""
    held: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
    for module in model.modules():
        volatile = [(module._buffers, name, tensor) for name, tensor in module._buffers.items()]
        if getattr(module, "max_norm", None) is not None:
            volatile += [(module._parameters, name, tensor) for name, tensor in module._parameters.items()]
        for owner, name, tensor in volatile:
            if tensor is not None and not tensor.is_meta:
                held.append((owner, name, tensor, tensor.detach().clone(), tensor._version))
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:
        with torch.no_grad(), torch.inference_mode(False):
            for owner, name, tensor, value, version in held:
                owner[name] = tensor
                if tensor._version != version:
                    tensor.copy_(value)
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    return restore


@contextmanager
def exact_arithmetic(tf32: bool = False) -> Iterator[None]:
    """Float32 means float32: TF32 only where it was asked for."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@contextmanager
def plain_execution() -> Iterator[None]:
    """Every operation visible to the recorder and differentiable in a batch.

    Gradients on; no compiled code; no fused attention or encoder fast path (they hide weights or have no batched
    backward); checkpointed segments run as they stand, since their recomputation would not be watched.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
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
    reentrant.apply = run_directly  # type: ignore[method-assign,assignment]
    if generator is not None:
        setattr(checkpointing, name, do_nothing)
    try:
        yield
    finally:
        if not had_own:
            del reentrant.apply
        if generator is not None:
            setattr(checkpointing, name, generator)
