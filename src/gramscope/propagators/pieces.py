"""One use of one weight: ``J*`` and ``J`` at that place, from what the weight was multiplied with. No autograd.

A site ``u = W v`` gives ``J* q = Σ q ⊗ v`` and ``J dW = dW v``, so its part of K is ``V Vᵀ ⊗ 1``, applied as two
products, or by the Gram matrix ``V Vᵀ`` itself where there are fewer rows than twice the fan-in.
"""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Inexact
from torch import Tensor

from gramscope.capture.forms import Gain, Lookup, Outer
from gramscope.capture.linear_map import LinearMap
from gramscope.capture.recorder import Use
from gramscope.capture.weights import Weight


class Origin:
    """Where the entries of a weight, as it was used, come from: parameters by name."""

    def __init__(self, weight: Weight, names: Mapping[int, str]) -> None:
        self.weight = weight
        self.names = [names[id(root)] for root in weight.roots]
        self.shape = weight.tensor.shape
        self._index: Tensor | None = None
        self._linear_map: LinearMap | None = None
        if weight.frame is None:
            roots = list(weight.roots)
            self._linear_map = LinearMap([weight.tensor], roots, [root.shape for root in roots])
        elif (index := weight.placement()) is not None:
            self._index = index.to(weight.tensor.device)

    def pull(self, gradient: Inexact[Tensor, "k *shape"]) -> dict[str, Tensor]:
        """From gradients of the weight as used to gradients of the parameters."""
        k, roots = len(gradient), self.weight.roots
        if self._linear_map is not None:
            cotangent = gradient.reshape(k, *self.shape).to(self.weight.tensor.dtype)
            found = self._linear_map.vjp([cotangent])
            return {name: g for name, g in zip(self.names, found, strict=True) if g is not None}
        if gradient.is_complex():  # a real parameter that was cast
            gradient = gradient.real
        if self._index is None:
            return {self.names[0]: gradient.reshape(k, *roots[0].shape)}
        flat = gradient.new_zeros(k, roots[0].numel()).index_add_(1, self._index, gradient.reshape(k, -1))
        return {self.names[0]: flat.reshape(k, *roots[0].shape)}

    def push(self, changes: Mapping[str, Tensor]) -> Tensor | None:
        """From changes of the parameters to the change of the weight as used, (k, *shape)."""
        mine = [changes.get(name) for name in self.names]
        given = next((change for change in mine if change is not None), None)
        if given is None:
            return None
        k = len(given)
        if self._linear_map is not None:
            roots = self.weight.roots
            tangents = [None if c is None else c.to(root.dtype) for c, root in zip(mine, roots, strict=True)]
            return self._linear_map.jvp(tangents, k)[0]
        if self.weight.tensor.is_complex():
            given = given.to(self.weight.tensor.dtype)
        if self._index is None:
            return given.reshape(k, *self.shape)
        return given.reshape(k, -1)[:, self._index].reshape(k, *self.shape)


class Piece:
    """A use of a weight with the two products of its form; signals and changes of u are ``(k, *shape of u)``."""

    def __init__(self, use: Use, shape: torch.Size, origin: Origin) -> None:
        self.use, self.shape, self.origin = use, shape, origin
        self._pull, self._push = _products(use, shape, origin.shape)

    @torch.no_grad()
    def pull(self, signal: Tensor) -> dict[str, Tensor]:
        return self.origin.pull(self._pull(signal))

    @torch.no_grad()
    def push(self, changes: Mapping[str, Tensor]) -> Tensor | None:
        change = self.origin.push(changes)
        return None if change is None else self._push(change)

    def gram_product(self) -> "Product | None":
        """``(V Vᵀ ⊗ 1) q`` by the Gram matrix, where that is cheaper than two products.

        With R rows, fan-in i and fan-out o the one costs R² o, the other 2 R i o; R² numbers are kept, at most 2 i R.
        """
        form = self.use.form
        if not isinstance(form, Outer) or self.use.weight.frame is None:
            return None
        inputs = form.inputs(slice(None))  # (M, T, g, i)
        rows, groups, fan_in = inputs.shape[0] * inputs.shape[1], *inputs.shape[2:]
        if inputs.is_complex() or rows >= 2 * fan_in:
            return None
        flat = inputs.reshape(rows, groups, fan_in)
        gram = torch.einsum("rgi,sgi->grs", flat, flat)
        back = _unarranged(form, self.shape)

        def product(signal: Tensor) -> Tensor:
            arranged = form.arrange(signal)  # (k, M, T, g, o)
            spread = torch.einsum("grs,ksgo->krgo", gram.to(signal.dtype), arranged.flatten(1, 2))
            return back(spread.reshape(arranged.shape))

        return product


Product = Callable[[Tensor], Tensor]


def _products(use: Use, shape: torch.Size, weight: torch.Size) -> tuple[Product, Product]:
    form = use.form
    if isinstance(form, Outer):
        return _outer(form, shape)
    if isinstance(form, Lookup):
        return _lookup(form, shape)
    if isinstance(form, Gain):
        return _gain(form, shape, weight)
    return (lambda signal: signal), (lambda change: change)  # a tap: u is the weight itself


def _outer(form: Outer, shape: torch.Size) -> tuple[Product, Product]:
    """``Σ s ⊗ v`` and ``dW v`` over M rows, T positions and g groups."""
    back = _unarranged(form, shape)
    inverse = [form.order.index(axis) for axis in range(len(form.order))]
    sizes = [form.axes[axis] for axis in form.order]

    def pull(signal: Tensor) -> Tensor:
        inputs = form.inputs(slice(None)).to(signal.dtype)  # (M, T, g, i)
        rows = form.arrange(signal)  # (k, M, T, g, o)
        gradient = torch.einsum("kMTgo,MTgi->kgoi", rows, inputs).reshape(len(signal), *form.axes)
        return gradient.permute(0, *(1 + axis for axis in form.order))

    def push(change: Tensor) -> Tensor:
        inputs = form.inputs(slice(None)).to(change.dtype)
        groups, fan_in = inputs.shape[2:]
        ordered = change.reshape(len(change), *sizes).permute(0, *(1 + axis for axis in inverse))
        return back(torch.einsum("MTgi,kgoi->kMTgo", inputs, ordered.reshape(len(change), groups, -1, fan_in)))

    return pull, push


def _unarranged(form: Outer, shape: torch.Size) -> Product:
    """The transpose of ``form.arrange``: for a mere change of order its inverse."""
    count = math.prod(shape)
    places = form.arrange(torch.arange(count, dtype=torch.float64, device="cpu").reshape(1, *shape)).reshape(-1)
    in_order = torch.arange(count, dtype=torch.float64, device="cpu")
    if torch.equal(places, in_order):
        return lambda rows: rows.reshape(len(rows), *shape)
    if len(places) == count and torch.equal(places.sort().values, in_order):
        where = places.long()

        def reorder(rows: Tensor) -> Tensor:
            flat = rows.new_empty(len(rows), count)
            flat[:, where.to(rows.device)] = rows.reshape(len(rows), -1)
            return flat.reshape(len(rows), *shape)

        return reorder

    def transpose(rows: Tensor) -> Tensor:  # patches overlap, as in a transposed convolution
        with torch.enable_grad():
            start = rows.new_zeros(len(rows), *shape, requires_grad=True)
            return torch.autograd.grad(form.arrange(start), start, rows)[0]

    return transpose


def _lookup(form: Lookup, shape: torch.Size) -> tuple[Product, Product]:
    ids = form.ids.reshape(-1)
    keep = None if form.ignored is None else (ids != form.ignored)[:, None]

    def pull(signal: Tensor) -> Tensor:
        rows = signal.reshape(len(signal), len(ids), shape[-1])
        rows = rows if keep is None else rows * keep
        return signal.new_zeros(len(signal), form.table, shape[-1]).index_add_(1, ids, rows)

    def push(change: Tensor) -> Tensor:
        rows = change.reshape(len(change), form.table, shape[-1])[:, ids]
        rows = rows if keep is None else rows * keep
        return rows.reshape(len(change), *shape)

    return pull, push


def _gain(form: Gain, shape: torch.Size, weight: torch.Size) -> tuple[Product, Product]:
    """``u = op(data, W)`` entry by entry; axes along which W was broadcast are summed."""
    wide = (1,) * (len(shape) - len(form.shape)) + tuple(form.shape)
    summed = tuple(axis + 1 for axis, size in enumerate(wide) if size == 1 and shape[axis] != 1)

    def pull(signal: Tensor) -> Tensor:
        if form.factor is not None:
            signal = signal * form.factor().to(signal.dtype).reshape(shape)
        gradient = signal.sum(summed) if summed else signal
        return gradient.reshape(len(signal), *weight)

    def push(change: Tensor) -> Tensor:
        spread = change.reshape(len(change), *wide).expand(len(change), *shape)
        if form.factor is None:
            return spread.clone()
        return spread * form.factor().to(change.dtype).reshape(shape)

    return pull, push
