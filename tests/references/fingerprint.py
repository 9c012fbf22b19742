"""All that a measurement might disturb: the model, and torch's, Python's and NumPy's own state."""

import random
import warnings
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def fingerprint(model: nn.Module, x: Any = None) -> dict[str, Any]:
    """name -> value, with copies of all tensors; compare two by `assert_same_fingerprint`."""
    return tree_map_only(Tensor, _frozen_copy, _model_state(model) | _process_state() | {"x": x})


def assert_same_fingerprint(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise, and name what differs, unless both are the same to the last bit."""
    changed = [key for key in sorted(before | after) if not _same(before.get(key), after.get(key))]
    if changed:
        raise AssertionError(f"changed: {', '.join(changed)}")


def _model_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        state[f"parameter {name}"] = p.detach()
        state[f"parameter {name}: identity"] = (id(p), p.data_ptr() if _has_storage(p) else 0)
        state[f"parameter {name}: grad"] = p.grad
        state[f"parameter {name}: flags"] = (p.requires_grad, p.is_leaf, p.dtype, p.device, p.layout, type(p))
        state[f"parameter {name}: hooks"] = (
            list(p._backward_hooks or ()),
            list(getattr(p, "_post_accumulate_grad_hooks", None) or ()),
        )
    for name, b in model.named_buffers(remove_duplicate=False):
        state[f"buffer {name}"] = b
        state[f"buffer {name}: identity"] = id(b)
    for name, module in model.named_modules(remove_duplicate=False):
        state[f"module {name}: training"] = module.training
        state[f"module {name}: class"] = (id(module), type(module))
        state[f"module {name}: attributes"] = sorted(vars(module))
        for attribute, value in vars(module).items():
            if "hooks" in attribute and isinstance(value, dict):
                state[f"module {name}: {attribute}"] = [(key, id(hook)) for key, hook in value.items()]
    return state


def _process_state() -> dict[str, Any]:
    module, cuda = torch.nn.modules.module, torch.backends.cuda
    return {
        "torch random numbers": torch.get_rng_state(),
        "python random numbers": random.getstate(),
        "numpy random numbers": numpy.random.get_state(),  # noqa: NPY002 the legacy stream is the one to guard
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32),
        "cudnn": (
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.enabled,
        ),
        "mkldnn": torch.backends.mkldnn.enabled,
        "attention kernels": (
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "global hooks": [
            list(getattr(module, name))
            for name in sorted(vars(module))
            if name.startswith("_global_") and name.endswith("hooks")
        ],
        "warning filters": list(warnings.filters),
    }


def _has_storage(t: Tensor) -> bool:
    return t.layout == torch.strided and t.device.type != "meta"


def _frozen_copy(t: Tensor) -> Tensor:
    return t.detach().clone()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.layout != b.layout:
            return False
        if a.device.type == "meta":
            return True
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.is_quantized:
            a, b = a.int_repr(), b.int_repr()
        return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN stays NaN
    if isinstance(a, numpy.ndarray) and isinstance(b, numpy.ndarray):
        return bool(numpy.array_equal(a, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b
