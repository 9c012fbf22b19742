"""Every weight of a network as matrices: which parameters have a spectrum, how they are cut, and what is left out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramscope.base.checks import check_plain
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.linalg import LinearOperator
from gramscope.spectra.layouts import Layout, MatrixParts, cut_module_parameter, cut_named_tensor
from gramscope.spectra.parametrised import effective_weights

Source: TypeAlias = nn.Module | Mapping[str, Any] | Tensor | np.ndarray | LinearOperator


@dataclass(frozen=True, eq=False)
class Weight:
    """One row of an analysis: a stack of equally shaped matrices, or a symmetric operator.

    ``name`` is the parameter's, with the part in brackets where it packs several (``attn.in_proj_weight[q]``).
    λ of the stack (k, rows, cols) are multiplied by ``scale``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    matrices: Tensor | LinearOperator
    scale: float = 1.0


@dataclass(frozen=True)
class Skipped:
    """A parameter that has no row of its own, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str


def weights_of(source: Source, layout: Layout) -> tuple[list[Weight], list[Skipped]]:
    """All weights of a module, a state dict, or a single matrix; tied weights once; and what was left out."""
    found = _Collector(layout)
    if isinstance(source, nn.Module):
        _from_module(source, found)
    elif isinstance(source, Mapping):
        _from_mapping(source, found)
    elif isinstance(source, (Tensor, np.ndarray, LinearOperator)):
        _from_mapping({"weight": source}, found)
    else:
        raise UnsupportedError(
            "analyze needs a torch module, a dict of tensors (a state dict), a matrix or a symmetric operator, "
            f"got {type(source).__name__}. Load a checkpoint first, e.g. torch.load(path, weights_only=True)."
        )
    if not found.weights and not found.skipped:
        raise InputError(
            "there is nothing to analyse: the source has no parameters. For a quantised or frozen model pass the "
            "floating one, or a dict of its weights."
        )
    return found.weights, found.skipped


class _Collector:
    """Takes parameters one by one and sorts them into weights and skipped."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.weights: list[Weight] = []
        self.skipped: list[Skipped] = []
        self._seen: dict[object, str] = {}

    def skip(self, name: str, shape: tuple[int, ...], reason: str) -> None:
        self.skipped.append(Skipped(name, shape, reason))

    def add(self, name: str, tensor: Tensor, cut: Callable[[Tensor, Layout], MatrixParts | str]) -> None:
        if is_lazy(tensor):
            self.skip(name, (), "not initialised yet: a lazy module gets its shape from a first forward pass")
            return
        shape = tuple(tensor.shape)
        reason = _why_unmeasurable(tensor)
        if reason is None:
            check_plain(tensor, f"the weight {name}")
            first = self._seen.setdefault(_identity(tensor), name)
            reason = None if first == name else f"the same tensor as {first}, analysed there"
        cut_up = reason or cut(tensor.detach(), self.layout)
        if isinstance(cut_up, str):
            self.skip(name, shape, cut_up)
            return
        for part, stack in cut_up.parts.items():
            self.weights.append(Weight(f"{name}[{part}]" if part else name, cut_up.kind, shape, stack, cut_up.scale))


def _from_module(model: nn.Module, found: _Collector) -> None:
    strip = _stripper(isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel))
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        computed, replaced = effective_weights(module)
        cut = partial(cut_module_parameter, module, path.rpartition(".")[2])
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = strip(prefix + name)
            shape = () if is_lazy(parameter) else tuple(parameter.shape)
            if ".parametrizations." in f".{prefix}":
                found.skip(full, shape, f"enters through {full.split('.parametrizations.')[0]}'s parametrised weight")
            elif name in replaced:
                found.skip(full, shape, f"enters through {strip(prefix + replaced[name])}")
            else:
                found.add(full, parameter, partial(cut, name))
        for name, weight in computed.items():
            if isinstance(weight, str):
                found.skip(strip(prefix + name), (), weight)
            else:
                found.add(strip(prefix + name), weight, partial(cut, name))


def _from_mapping(tensors: Mapping[str, Any], found: _Collector) -> None:
    named = {str(name): value for name, value in tensors.items()}
    strip = _stripper(len(named) > 0 and all(name.startswith("module.") for name in named))
    shapes = {strip(name): tuple(value.shape) for name, value in named.items() if isinstance(value, Tensor)}
    for key, value in named.items():
        name = strip(key)
        if isinstance(value, LinearOperator):
            _add_operator(name, value, found)
            continue
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            value = torch.from_numpy(np.array(value))
        if isinstance(value, Tensor):
            found.add(name, value, partial(cut_named_tensor, name, shapes))
        else:
            advice = "; pass this part alone to analyse it" if isinstance(value, Mapping) else ""
            found.skip(name, (), f"not a tensor but a {type(value).__name__}{advice}")
    nested = [name for name, value in named.items() if isinstance(value, Mapping)]
    if not found.weights and nested and not shapes:
        raise InputError(
            f"the dict must map names to tensors, but it holds none; its entries {nested} are dicts themselves. "
            f"Pass the one with the weights, e.g. checkpoint[{nested[0]!r}]."
        )


def _add_operator(name: str, operator: LinearOperator, found: _Collector) -> None:
    if operator.symmetric:
        found.weights.append(Weight(name, "operator", operator.shape, operator))
    else:
        found.skip(
            name, operator.shape, "an operator not declared symmetric: pass A.T @ A for its squared singular values"
        )


def _why_unmeasurable(tensor: Tensor) -> str | None:
    if type(tensor).__name__ == "DTensor":
        return "sharded over processes: gather it first (full_tensor())"
    if tensor.is_complex():
        return f"complex ({tensor.dtype}): spectra of complex weights are not supported"
    if tensor.is_quantized or not tensor.is_floating_point():
        return f"not a floating tensor ({tensor.dtype}): dequantise it first"
    if tensor.layout is not torch.strided:
        return f"not a dense tensor ({tensor.layout}): call .to_dense() first"
    return None


def _identity(tensor: Tensor) -> object:
    """Equal for two names of one tensor: the same memory, read the same way."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _stripper(wrapped: bool) -> Callable[[str], str]:
    """Names without what data parallelism and torch.compile put in front of them."""
    return lambda name: (name.removeprefix("module.") if wrapped else name).replace("_orig_mod.", "")
