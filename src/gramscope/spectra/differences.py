"""Two models: what fine-tuning changed, weight by weight; the change that a LoRA adapter makes."""

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.base.agreement import cosine
from gramscope.base.checks import check_number
from gramscope.base.errors import InputError
from gramscope.spectra.eigenvalues import pooled_squared_singular_values
from gramscope.spectra.layouts import Layout
from gramscope.spectra.spectrum_ranks import ranks_checked
from gramscope.spectra.weights import weights_of

if TYPE_CHECKING:
    from pandas import DataFrame

Model = nn.Module | Mapping[str, Tensor]
_LORA_KEY = re.compile(r"(?P<path>.*?)\.?lora_A(\.(?P<adapter>[^.]+?))??(\.weight)?$")


@torch.no_grad()
def deltas(base: Model, tuned: Model, include: str = "*") -> dict[str, Tensor]:
    """``ΔW = W_tuned − W_base`` of every parameter, by name: what fine-tuning did.

    ``base`` and ``tuned`` are two modules or state dicts with the same names and shapes; ``include`` is a glob of the
    names to compare. The differences are float64 where a weight is, else float32. ``analyze(deltas(base, tuned))``
    gives the spectra of the change.

    >>> base = {"weight": torch.zeros(2, 2)}
    >>> deltas(base, {"weight": torch.eye(2)})["weight"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    before, after = _tensors(base, include), _tensors(tuned, include)
    alone = sorted(before.keys() ^ after.keys())
    unlike = [name for name in before.keys() & after.keys() if before[name].shape != after[name].shape]
    if not before or alone or unlike:
        raise InputError(
            "the two models must have the same parameters: "
            + (f"only one has {alone[:5]}. " if alone else "")
            + (f"shapes differ in {sorted(unlike)[:5]}. " if unlike else "")
            + (f"no name matches include={include!r}. " if not before else "")
            + "Choose those in common with include, or pass lora_deltas(model) for an adapter."
        )
    return {name: _wide(after[name]) - _wide(before[name]).to(after[name].device) for name in before}


@torch.no_grad()
def lora_deltas(source: Model, scaling: float | None = None) -> dict[str, Tensor]:
    """``ΔW = s B A`` of every LoRA adapter of a model or of an adapter's state dict, by the name of its layer.

    ``s`` is the module's own scaling α/r. A state dict does not hold it, so there pass ``scaling`` (default 1). Several
    adapters of one layer are named ``layer.weight[adapter]``. Understands the layers of peft and of loralib; kernels of
    convolutions are flattened. E. Hu et al. 2021 (arXiv:2106.09685), section 4.1.

    >>> adapter = {"fc.lora_A.weight": torch.ones(1, 3), "fc.lora_B.weight": torch.ones(2, 1)}
    >>> lora_deltas(adapter, scaling=2.0)["fc.weight"].tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    scaling = None if scaling is None else check_number(scaling, "scaling")
    found = list(_module_adapters(source, scaling) if isinstance(source, nn.Module) else _key_adapters(source, scaling))
    if not found:
        raise InputError(
            "there is no LoRA adapter: no layer has lora_A and lora_B. Two whole models are compared by "
            "deltas(base, tuned)."
        )
    for path, _, down, up, _ in found:
        if len(down) != up[0].numel():
            raise InputError(
                f"lora_A and lora_B of {path!r} must be of one rank, got {tuple(down.shape)} and {tuple(up.shape)}."
            )
    layers = [path for path, *_ in found]
    return {
        f"{path}.weight" + (f"[{adapter}]" if layers.count(path) > 1 else ""): s * (_flat(up) @ _flat(down))
        for path, adapter, down, up, s in found
    }


def distances(base: Model, tuned: Model, include: str = "*") -> "DataFrame":
    """How far two models are apart, one row a weight; ``frame.attrs["relative"]`` for the whole network.

    ``norm = |W|`` of the base, ``distance = |ΔW|`` (Frobenius), ``relative = |ΔW|/|W|``, ``spectral = ‖ΔW‖₂``,
    ``stable_rank = |ΔW|²/‖ΔW‖₂²`` of the change, its ``rank`` (low after LoRA: singular values above ``ε |W|``, the
    rounding of the weights' dtype), and ``cosine`` between the two weights. Arguments as for :func:`deltas`. Vectors
    (biases, gains) count in the attrs and have no row.

    >>> base = {"a.weight": torch.eye(3), "a.bias": torch.zeros(3)}
    >>> frame = distances(base, {"a.weight": torch.eye(3) + torch.ones(3, 3) / 3, "a.bias": torch.zeros(3)})
    >>> frame["rank"].tolist(), round(frame.attrs["relative"], 4)
    ([1], 0.5774)
    """
    from pandas import DataFrame

    change, before = deltas(base, tuned, include), _tensors(base, include)
    layout = Layout()
    own = {weight.name: weight.matrices for weight in weights_of(before, layout)[0]}
    rows = []
    for weight in weights_of(change, layout)[0]:
        was, moved = own.get(weight.name), weight.matrices
        if isinstance(was, Tensor) and isinstance(moved, Tensor):
            rows.append({"name": weight.name, "kind": weight.kind, "shape": weight.shape, **_row(was, moved)})
    columns = ["name", "kind", "shape", "norm", "distance", "relative", "spectral", "stable_rank", "rank", "cosine"]
    frame = DataFrame(rows, columns=columns)
    size = math.sqrt(sum(float(_wide(tensor).double().square().sum()) for tensor in before.values()))
    moved_by = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in change.values()))
    frame.attrs.update(norm=size, distance=moved_by, relative=moved_by / size if size else math.nan)
    return frame


def _row(was: Tensor, moved: Tensor) -> dict[str, float | int]:
    before = was.detach().double().cpu()
    change = moved.detach().double().cpu()
    after = before + change
    squares = pooled_squared_singular_values(moved, "the change")
    spread = ranks_checked(squares, "gramscope", max(moved.shape[-2:]))
    norm, distance, end = float(before.norm()), float(change.norm()), float(after.norm())
    rounding = float(torch.finfo(was.dtype).eps) * max(norm, end)
    return {
        "norm": norm,
        "distance": distance,
        "relative": distance / norm if norm else math.nan,
        "spectral": math.sqrt(spread.lambda_max),
        "stable_rank": spread.stable_rank,
        "rank": min(spread.rank, int((squares > rounding**2).sum())),
        "cosine": cosine(before, after, "the cosine of the two weights") if norm and end else math.nan,
    }


def _tensors(model: Model, include: str) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        named: Mapping[str, Any] = dict(model.named_parameters())
    elif isinstance(model, Mapping):
        named = model
    else:
        raise InputError(f"a model must be a module or a dict of tensors (a state dict), got {type(model).__name__}.")
    return {
        name: value.detach()
        for name, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point() and fnmatchcase(name, include)
    }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _flat(factor: Tensor) -> Tensor:
    return _wide(factor.detach()).flatten(1)


Adapter = tuple[str, str, Tensor, Tensor, float]  # layer, adapter's name, A, B, scaling


def _module_adapters(model: nn.Module, scaling: float | None) -> Iterator[Adapter]:
    for path, module in model.named_modules():
        down, up = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        own = getattr(module, "scaling", 1.0)
        if isinstance(down, Tensor) and isinstance(up, Tensor):
            yield path, "", down, up, own if scaling is None else scaling
        elif isinstance(down, nn.ModuleDict) and isinstance(up, nn.ModuleDict):
            for adapter in down:
                s = own[adapter] if isinstance(own, Mapping) else own
                factors = [side[adapter].get_parameter("weight") for side in (down, up)]
                yield path, adapter, factors[0], factors[1], s if scaling is None else scaling


def _key_adapters(state: Mapping[str, Tensor], scaling: float | None) -> Iterator[Adapter]:
    for key, down in state.items():
        match = _LORA_KEY.match(key)
        partner = key.replace("lora_A", "lora_B")
        if match and partner in state:
            yield match["path"], match["adapter"] or "", down, state[partner], 1.0 if scaling is None else scaling
