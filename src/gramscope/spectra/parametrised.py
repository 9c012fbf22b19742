"""Weights that a module computes from other parameters, read without leaving a trace in the module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


def effective_weights(module: nn.Module) -> tuple[dict[str, Tensor | str], dict[str, str]]:
    """Weights that ``module`` uses but does not own as parameters, and which own parameters they stand for.

    Parametrisations (``torch.nn.utils.parametrize``), pruning, and the older weight and spectral norm by hooks.
    The first dict maps a name to the weight, or to the reason why it could not be computed; the second an own
    parameter to the weight it enters through.
    """
    computed: dict[str, Tensor | str] = {}
    replaced: dict[str, str] = {}
    if is_parametrized(module):
        for name in module.parametrizations:  # type: ignore[union-attr]
            computed[name] = _read(module, name)
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    for name, parameter in own.items():
        stem = name.removesuffix("_orig")
        if stem == name:
            continue
        if f"{stem}_mask" in buffers:  # torch.nn.utils.prune
            computed[stem] = parameter.detach() * buffers[f"{stem}_mask"]
            replaced[name] = stem
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    for hook in hooks:
        name = getattr(hook, "name", None)
        kind = type(hook).__name__
        if kind == "WeightNorm" and isinstance(name, str):
            computed[name] = _guarded(module, partial(hook.compute_weight, module))
            replaced.update({f"{name}_g": name, f"{name}_v": name})
        elif kind == "SpectralNorm" and isinstance(name, str):
            computed[name] = _guarded(module, partial(hook.compute_weight, module, do_power_iteration=False))
            replaced[f"{name}_orig"] = name
    return computed, replaced


def _read(module: nn.Module, name: str) -> Tensor | str:
    return _guarded(module, lambda: getattr(module, name))


def _guarded(module: nn.Module, compute: Callable[[], object]) -> Tensor | str:
    try:
        with untouched(module), torch.no_grad():
            weight = compute()
    except Exception as error:  # a user's parametrisation may raise anything; the other weights are still worth a look
        return f"computing it raised {type(error).__name__}: {error}"
    if not isinstance(weight, Tensor):
        return f"not a tensor but a {type(weight).__name__}"
    return weight.detach().clone()


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, as it was after: flags, buffers and random streams.

    Reading a spectrally normalised weight in training mode takes a step of its power iteration, and a random
    parametrisation draws numbers; neither may be left behind by a look.
    """
    flags = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    devices = {buffer.device.index for buffer, _ in buffers if buffer.is_cuda}
    devices |= {parameter.device.index for parameter in module.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
            for part, _ in flags:
                part.training = False
            yield
    finally:
        for part, flag in flags:
            part.training = flag
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
