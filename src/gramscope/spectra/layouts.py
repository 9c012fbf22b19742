"""How the entries of one parameter become matrices: slices or patches of convolutions, gates, packed q, k, v."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.rnn import RNNCellBase

_ELEMENTWISE = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU, _NormBase)
_GATES = {4: ("i", "f", "g", "o"), 3: ("r", "z", "n"), 1: ("",)}
# Modules that pack query, key and value one after another, and are known to. Others (GPT-NeoX's query_key_value)
# interleave them head by head, and thirds of those would be mixtures.
_PACKED = {"in_proj", "c_attn", "qkv", "Wqkv", "qkv_proj"}
# What torch's attention has instead of in_proj_weight where keys or values are of another width (kdim, vdim).
_SEPARATE = {"q_proj_weight", "k_proj_weight", "v_proj_weight"}

_VECTOR = "a vector or a number (bias, gain), so it is no matrix"


@dataclass(frozen=True)
class Layout:
    """How to cut: convolutions by kernel position ("slices") or as (out, in · positions) ("unfold").

    ``weightwatcher``: groups are ignored, and λ of two-dimensional convolutions halved.
    """

    conv: str = "slices"
    weightwatcher: bool = False


@dataclass(frozen=True, eq=False)
class MatrixParts:
    """Named parts of one parameter, each a stack (k, rows, cols)."""

    kind: str
    parts: dict[str, Tensor]
    scale: float = 1.0


def cut_module_parameter(
    module: nn.Module, called: str, name: str, tensor: Tensor, layout: Layout
) -> MatrixParts | str:
    """The matrices of a parameter whose module is known, or why it has none."""
    if _is(module, *_ELEMENTWISE):
        return f"scales or shifts single features of a {_class_name(module)}, so it is no matrix"
    if why := _why_no_matrix(tensor):
        return why
    if _is(module, _ConvNd) and tensor.ndim > 2:
        return _convolution(tensor, int(getattr(module, "groups", 1)), _is(module, _ConvTransposeNd), layout)
    if _is(module, nn.RNNBase, RNNCellBase):
        return _gates(name, tensor, _gate_count(module))
    if _is(module, nn.MultiheadAttention) and name == "in_proj_weight":
        return MatrixParts("attention", _thirds(tensor))
    if _is(module, nn.MultiheadAttention) and name in _SEPARATE:
        return MatrixParts("attention", {"": tensor[None]})
    if _is(module, nn.Embedding, nn.EmbeddingBag):
        return MatrixParts("embedding", {"": tensor[None]})
    if _is(module, nn.Bilinear):
        return MatrixParts("bilinear", {"": tensor.flatten(1)[None]})
    # transformers' Conv1D is a Linear whose weight lies the other way round: (in, out).
    transposed = _class_name(module) == "Conv1D"
    if (_is(module, nn.Linear) or transposed) and tensor.ndim == 2:
        return _linear(called, tensor, transposed)
    return _bare(tensor)


def cut_named_tensor(
    name: str, shapes: Mapping[str, tuple[int, ...]], tensor: Tensor, layout: Layout
) -> MatrixParts | str:
    """The matrices of a tensor of which only the name is known, as in a state dict."""
    if ".parametrizations." in f".{name}":
        return "part of a parametrised weight, which needs the module to be computed: pass the module"
    if name.endswith(("_g", "_v")) and {name[:-1] + "g", name[:-1] + "v"} <= set(shapes):
        return "part of a weight-normalised weight, which needs the module to be computed: pass the module"
    stem, _, part = name.rpartition("_")
    if part in ("orig", "mask") and {f"{stem}_orig", f"{stem}_mask"} <= set(shapes):
        return f"part of a pruned weight ({stem}_orig times {stem}_mask), which needs the module: pass the module"
    if part == "orig" and f"{stem}_u" in shapes:
        return "part of a spectrally normalised weight, which needs the module to be computed: pass the module"
    if why := _why_no_matrix(tensor):
        return why
    owner, _, last = name.rpartition(".")
    if re.match(r"weight_(ih|hh|hr)(_l\d+)?(_reverse)?$", last):
        return _gates(last, tensor, _gate_count_from_shapes(name, shapes))
    if last == "in_proj_weight" and tensor.ndim == 2 and tensor.shape[0] == 3 * tensor.shape[1]:
        return MatrixParts("attention", _thirds(tensor))
    if last in _SEPARATE and tensor.ndim == 2:
        return MatrixParts("attention", {"": tensor[None]})
    if last == "weight" and tensor.ndim >= 3:
        return _convolution(tensor, 1, False, layout)
    if last == "weight" and tensor.ndim == 2:
        called = owner.rpartition(".")[2]
        cut = _linear(called, tensor, called == "c_attn" and tensor.shape[1] == 3 * tensor.shape[0])
        return MatrixParts("matrix" if cut.kind == "linear" else cut.kind, cut.parts)
    return _bare(tensor)


def _why_no_matrix(tensor: Tensor) -> str | None:
    if tensor.numel() == 0:
        return "it has no entries"
    return _VECTOR if tensor.ndim < 2 else None


def _convolution(tensor: Tensor, groups: int, transposed: bool, layout: Layout) -> MatrixParts:
    """Weights are (out, in/groups, *kernel), of a transposed convolution (in, out/groups, *kernel)."""
    halved = layout.weightwatcher and layout.conv == "slices" and tensor.ndim == 4
    groups = 1 if layout.weightwatcher else groups
    grouped = tensor.reshape(groups, tensor.shape[0] // groups, tensor.shape[1], -1)
    if layout.conv == "unfold":
        stack = grouped.flatten(2)
    else:
        stack = grouped.permute(3, 0, 1, 2).flatten(0, 1)
    return MatrixParts("conv_transpose" if transposed else "conv", {"": stack}, 0.5 if halved else 1.0)


def _gates(name: str, tensor: Tensor, count: int) -> MatrixParts | str:
    # The projection (weight_hr) of an LSTM is one map for all gates.
    whole = name.startswith("weight_hr") or count not in _GATES or tensor.shape[0] % count
    if tensor.ndim != 2 or whole:
        bare = _bare(tensor)
        return bare if isinstance(bare, str) else MatrixParts("recurrent", bare.parts)
    return MatrixParts(
        "recurrent", {gate: part[None] for gate, part in zip(_GATES[count], tensor.chunk(count), strict=True)}
    )


def _gate_count(module: nn.Module) -> int:
    if _is(module, nn.LSTM, nn.LSTMCell):
        return 4
    return 3 if _is(module, nn.GRU, nn.GRUCell) else 1


def _class_name(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def _is(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """isinstance, or what a scripted module was compiled from."""
    return isinstance(module, classes) or issubclass(getattr(nn, _class_name(module), object), classes)


def _gate_count_from_shapes(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """weight_hh is (gates · hidden, hidden), except in an LSTM with a projection, which has a weight_hr."""
    if re.sub(r"weight_(ih|hh)", "weight_hr", name) in shapes:
        return 4
    hidden = shapes.get(re.sub(r"weight_ih", "weight_hh", name), ())
    return hidden[0] // hidden[1] if len(hidden) == 2 else 1


def _linear(called: str, tensor: Tensor, transposed: bool) -> MatrixParts:
    matrix = tensor.mT if transposed else tensor
    if called in _PACKED and matrix.shape[0] == 3 * matrix.shape[1]:
        return MatrixParts("attention", _thirds(matrix))
    return MatrixParts("linear", {"": matrix[None]})


def _thirds(matrix: Tensor) -> dict[str, Tensor]:
    return {part: rows[None] for part, rows in zip("qkv", matrix.chunk(3), strict=True)}


def _bare(tensor: Tensor) -> MatrixParts | str:
    """A parameter of which nothing is known: its last two axes longer than one span a matrix, the others stack them."""
    sizes = [size for size in tensor.shape if size > 1]
    if tensor.ndim == 2:  # of one row or column too: so is the weight of a linear layer with one output
        return MatrixParts("parameter", {"": tensor[None]})
    if len(sizes) < 2:  # attention's bias_k and bias_v, a class token
        return _VECTOR
    return MatrixParts("parameter", {"": tensor.reshape(-1, sizes[-2], sizes[-1])})
