"""Weights that a module computes from other parameters, read without leaving a trace in the module."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gramscope.capture.side_effects import in_modes, untouched


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
            computed[name] = _guarded(module, partial(getattr, module, name))
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    for name, parameter in own.items():
        stem = name.removesuffix("_orig")
        if stem != name and f"{stem}_mask" in buffers:  # torch.nn.utils.prune
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


def _guarded(module: nn.Module, compute: Callable[[], object]) -> Tensor | str:
    try:
        # In training mode a look at a spectrally normalised weight would take a step of its power iteration.
        with untouched(module), in_modes([(part, False) for part in module.modules()]), torch.no_grad():
            weight = compute()
    except Exception as error:  # a user's parametrisation may raise anything; the other weights are still worth a look
        return f"computing it raised {type(error).__name__}: {error}"
    if not isinstance(weight, Tensor):
        return f"not a tensor but a {type(weight).__name__}"
    return weight.detach().clone()
