"""Parameters read as the matrices that they are: ``u = W v`` with W of shape (g, o, i), g groups of o × i.

Two ways lead there. A snapshot tells how each weight was really used (bare parameters, transposed products, packed
projections). Without a batch of examples, the module that owns a parameter tells: linear, convolution, recurrent and
attention layers, and bilinear ones. What is no such matrix is listed with the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramscope.base.errors import InputError
from gramscope.capture import OuterSite, Site, Snapshot
from gramscope.capture.network import named_parameters, unwrap
from gramscope.measures.by_weight import ByWeight

# Rows of unfolded inputs, times their width, that are held in float64 at once.
BLOCK_ENTRIES = 2**24


@dataclass(frozen=True, eq=False)
class MatrixForm:
    """How a parameter of shape ``shape`` is read as ``groups`` matrices of fan-out × fan-in.

    ``axes`` are the sizes of the axes in the order (group, out, in), ``order`` brings them to the parameter's own;
    ``index`` are the entries of the flattened parameter that the weight is made of (None: all).

    >>> form = MatrixForm.plain((4, 2, 3, 3), groups=2)
    >>> form.groups, form.fan_out, form.fan_in
    (2, 2, 18)
    >>> kernel = torch.arange(72.0).reshape(4, 2, 3, 3)
    >>> bool((form.tensor(form.matrices(kernel), kernel) == kernel).all())
    True
    """

    shape: tuple[int, ...]
    groups: int
    fan_out: int
    fan_in: int
    axes: tuple[int, ...]
    order: tuple[int, ...]
    index: Int[Tensor, " p"] | None = None

    @classmethod
    def plain(cls, shape: Sequence[int], groups: int = 1) -> "MatrixForm":
        """Outputs on the first axis (in ``groups`` blocks), inputs on all others: linear and convolution layers."""
        shape = tuple(shape)
        sizes = groups, shape[0] // groups, math.prod(shape[1:])
        return cls(shape, *sizes, axes=sizes, order=(0, 1, 2))

    @classmethod
    def transposed(cls, shape: Sequence[int], groups: int = 1) -> "MatrixForm":
        """Inputs on the first axis (in ``groups`` blocks), outputs on all others: transposed convolutions."""
        shape = tuple(shape)
        sizes = groups, math.prod(shape[1:]), shape[0] // groups
        return cls(shape, *sizes, axes=sizes, order=(0, 2, 1))

    @classmethod
    def of_site(cls, site: OuterSite, shape: Sequence[int]) -> "MatrixForm":
        """The matrices as a captured site used them."""
        index = None if site.frame is None else site.frame.entries
        return cls(tuple(shape), site.groups, site.fan_out, site.fan_in, site.axes, site.order, index)

    def matrices(self, tensor: Tensor) -> Float[Tensor, "g o i"]:
        """A tensor of the parameter's shape (its value, gradient or step) as float64 matrices; always a copy."""
        flat = tensor.detach().to(torch.float64, copy=True).reshape(-1)
        if self.index is not None:
            flat = flat[self.index.to(flat.device)]
        own = flat.reshape([self.axes[axis] for axis in self.order])
        back = [self.order.index(axis) for axis in range(len(self.axes))]
        return own.permute(back).reshape(self.groups, self.fan_out, self.fan_in)

    def tensor(self, matrices: Float[Tensor, "g o i"], base: Tensor) -> Tensor:
        """The inverse: a copy of ``base`` (the parameter's shape and dtype) with these matrices as its entries."""
        flat = matrices.reshape(self.axes).permute(self.order).reshape(-1).to(base.dtype)
        if self.index is None:
            return flat.reshape(base.shape)
        whole = base.detach().reshape(-1).clone()
        whole[self.index.to(whole.device)] = flat
        return whole.reshape(base.shape)

    def same(self, other: "MatrixForm") -> bool:
        """Whether both read the same entries as the same matrices."""
        if (self.axes, self.order, self.groups) != (other.axes, other.order, other.groups):
            return False
        if self.index is None or other.index is None:
            return self.index is other.index
        return torch.equal(self.index, other.index)


def example_blocks(site: OuterSite) -> Iterator[slice]:
    """Some examples at a time, as many as are held at once in float64."""
    width = site.positions * site.groups * (site.fan_in + site.directions * site.fan_out)
    step = max(1, BLOCK_ENTRIES // max(1, width))
    return (slice(start, min(site.examples, start + step)) for start in range(0, site.examples, step))


@dataclass(frozen=True, eq=False)
class WeightForm:
    """One weight of a model: its parameter, its matrix form, and the captured sites where it was used (if any)."""

    parameter: str
    form: MatrixForm
    sites: tuple[OuterSite, ...] = field(default=(), repr=False)

    def rows(self) -> Iterator[tuple[Float[Tensor, "g N i"], Float[Tensor, "g k N o"]]]:
        """Inputs and signals in float64, group by group, some examples at a time; positions and uses are rows."""
        for site in self.sites:
            for some in example_blocks(site):
                inputs = site.inputs_of(some).double().flatten(0, 1).transpose(0, 1)
                signals = site.signals[some].double().permute(3, 1, 0, 2, 4).flatten(2, 3)
                yield inputs, signals


@dataclass(frozen=True, eq=False, repr=False)
class WeightForms(ByWeight[WeightForm]):
    """Weights by name, and the parameters that are no such matrix with the reason why (``left_out``)."""

    def chosen(self, patterns: str | Sequence[str]) -> "WeightForms":
        """Those whose name matches a glob; it is an error if none does."""
        globs = [patterns] if isinstance(patterns, str) else list(patterns)
        kept = {n: w for n, w in self.items() if any(fnmatchcase(n, glob) for glob in globs)}
        if not kept:
            raise InputError(
                f"weights={patterns!r} must match a weight matrix of the model, which has {list(self)}; "
                f"left out: {self.left_out}."
            )
        return WeightForms(kept, self.left_out)


def weight_forms(source: nn.Module | Snapshot) -> WeightForms:
    """The weight matrices of a model (by its modules) or of a snapshot (by their real use).

    A packed projection of an attention layer gives three groups (q, k, v) by modules; in a snapshot each part is a
    weight of its own, named ``in_proj_weight[0]`` and so on.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, groups=2), torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> {name: (w.form.groups, w.form.fan_out, w.form.fan_in) for name, w in weight_forms(model).items()}
        {'0.weight': (2, 2, 9), '2.weight': (1, 3, 16)}
        >>> sorted(weight_forms(model).left_out)
        ['0.bias', '2.bias']
    """
    return _forms_of_snapshot(source) if isinstance(source, Snapshot) else _forms_of_modules(source)


def check_same_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Raise unless two batches were measured on the same weights."""
    if a.keys() != b.keys() or not all(torch.equal(weight, b[name].to(weight)) for name, weight in a.items()):
        raise InputError(
            "batches of one network in one state can be merged, but the weights differ. Measure all batches "
            "between two training steps."
        )


# From a snapshot ---------------------------------------------------------------------------------------


def _forms_of_snapshot(snapshot: Snapshot) -> WeightForms:
    weights: dict[str, WeightForm] = {}
    left_out = dict.fromkeys(snapshot.frozen, "frozen: requires_grad is False")
    for name, sites in snapshot.by_parameter().items():
        outer = [site for site in sites if isinstance(site, OuterSite) and not site.signals.is_complex()]
        if len(outer) < len(sites) or not sites:
            left_out[name] = _why_not(sites)
            continue
        parts = _parts(outer, snapshot.parameters[name])
        if _overlap([form for form, _ in parts]):
            rules = ", ".join(sorted({site.rule for site in sites}))
            left_out[name] = (
                f"tied: one entry is used in {len(parts)} different matrices ({rules}), and its gradient is the sum "
                "over all of them"
            )
            continue
        for place, (form, uses) in enumerate(parts):
            key = name if len(parts) == 1 else f"{name}[{place}]"
            weights[key] = WeightForm(name, form, tuple(uses))
    return WeightForms(weights, left_out)


def _why_not(sites: Sequence[Site]) -> str:
    if not sites:
        return "not used by the output"
    rules = ", ".join(sorted({site.rule for site in sites}))
    return f"not a matrix that multiplies an input (used as: {rules})"


def _parts(sites: Sequence[OuterSite], shape: Sequence[int]) -> list[tuple[MatrixForm, list[OuterSite]]]:
    parts: list[tuple[MatrixForm, list[OuterSite]]] = []
    for site in sites:
        form = MatrixForm.of_site(site, shape)
        known = next((uses for other, uses in parts if other.same(form)), None)
        if known is None:
            parts.append((form, [site]))
        else:
            known.append(site)
    return sorted(parts, key=lambda part: 0 if part[0].index is None else int(part[0].index.min()))


def _overlap(forms: Sequence[MatrixForm]) -> bool:
    if len(forms) < 2:
        return False
    indices = [torch.arange(math.prod(f.shape), device="cpu") if f.index is None else f.index for f in forms]
    entries = torch.cat(indices)
    return len(torch.unique(entries)) < len(entries)


# From modules ------------------------------------------------------------------------------------------


def _convolution(module: Any, weight: Tensor) -> MatrixForm:
    if module.transposed:
        return MatrixForm.transposed(weight.shape, module.groups)
    return MatrixForm.plain(weight.shape, module.groups)


# Which parameters of a module are matrices, and how; the first row that fits counts.
_RULES: tuple[tuple[type[nn.Module], str, Callable[[Any, Tensor], MatrixForm]], ...] = (
    (nn.Linear, "weight", lambda module, weight: MatrixForm.plain(weight.shape)),
    (nn.Bilinear, "weight", lambda module, weight: MatrixForm.plain(weight.shape)),  # meets the outer product of both
    (nn.modules.conv._ConvNd, "weight", _convolution),
    (nn.RNNBase, "weight_*", lambda module, weight: MatrixForm.plain(weight.shape)),
    (nn.RNNCellBase, "weight_*", lambda module, weight: MatrixForm.plain(weight.shape)),
    (nn.MultiheadAttention, "in_proj_weight", lambda module, weight: MatrixForm.plain(weight.shape, groups=3)),
    (nn.MultiheadAttention, "[qkv]_proj_weight", lambda module, weight: MatrixForm.plain(weight.shape)),
)


def _forms_of_modules(model: nn.Module) -> WeightForms:
    model = unwrap(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} must have a shape, but it is lazy and not initialised. Call model(x) once first."
            )
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, attribute))
    weights: dict[str, WeightForm] = {}
    left_out: dict[str, str] = {}
    for name, parameter in named_parameters(model).items():
        forms = [_form_of_owner(module, attribute, parameter) for module, attribute in owners[id(parameter)]]
        first = forms[0]
        kinds = ", ".join(sorted({type(module).__name__ for module, _ in owners[id(parameter)]}))
        if not parameter.requires_grad:
            left_out[name] = "frozen: requires_grad is False"
        elif first is None:
            left_out[name] = (
                f"not the matrix of a linear, bilinear, convolution, recurrent or attention layer (it is in: {kinds})"
            )
        elif any(form is None or not form.same(first) for form in forms):
            left_out[name] = f"tied: used in different ways by {kinds}"
        else:
            weights[name] = WeightForm(name, first)
    return WeightForms(weights, left_out)


def _form_of_owner(module: nn.Module, attribute: str, parameter: Tensor) -> MatrixForm | None:
    for kind, pattern, form in _RULES:
        if isinstance(module, kind) and fnmatchcase(attribute, pattern):
            return form(module, parameter)
    # Hugging Face's Conv1D is a linear layer with its weight stored as (in, out).
    if type(module).__name__ == "Conv1D" and attribute == "weight" and parameter.dim() == 2:
        return MatrixForm.transposed(parameter.shape)
    return None
