"""Forms: how a weight made the output of an operation, and so how its signal becomes its gradient.

A form is given the raw signals ``(k, *u.shape)`` as rows ``(k, M, ...)`` and, once the layout of the M rows is
known, makes the Site.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.capture.layout import Layout, Ragged, Regular
from gramscope.capture.sites import Factors, Frame, LookupSite, OuterSite, RowSite, Site
from gramscope.capture.tape import Product, Signal

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Bytes of products that are summed at once.
CACHED = {"cpu": 2**24, "cuda": 2**28}


@dataclass(frozen=True, eq=False)
class Form:
    """Base of all forms; ``rule`` is the name that results carry."""

    rule: str = ""

    def as_rows(self, signals: Tensor) -> Tensor:
        """(k, *u.shape) -> (k, M, ...): one row for each piece that may belong to another example."""
        raise NotImplementedError

    def flat_rows(self, signals: Tensor) -> Tensor:
        """(k, *u.shape) -> (k, M, features) for the layout alone, the features in any order."""
        return self.as_rows(signals).flatten(2)

    def site(self, name: str, frame: Frame | None, rows: Tensor, layout: Layout) -> Site | None:
        """The site; None where this form cannot express the layout."""
        raise NotImplementedError

    @property
    def keeps_signals(self) -> bool:
        """The site may hold the memory of the signals that it was made from."""
        return True

    def taped_site(self, name: str, frame: Frame | None, signal: Signal, first: int) -> Site:
        """The site of signals (m, k, *u.shape[1:]) whose axis 0 is the examples from ``first`` on."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Outer(Form):
    """``u = W v``. ``inputs(rows)`` gives (M, T, g, i); ``arrange`` brings signals (k, *u.shape) to (k, M, T, g, o)."""

    inputs: Callable[[slice], Tensor] = None  # type: ignore[assignment]
    arrange: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]
    fan_in: int = 1
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    rows_first: bool = False  # u itself has the M rows as its first axis, so no arranging is needed to see them
    offset: Tensor | None = None  # what was added, (g·o)

    def as_rows(self, signals: Tensor) -> Tensor:
        return self.arrange(signals)

    def flat_rows(self, signals: Tensor) -> Tensor:
        return signals.flatten(2) if self.rows_first else super().flat_rows(signals)

    def site(self, name: str, frame: Frame | None, rows: Tensor, layout: Layout) -> Site:
        def inputs(examples: slice) -> Tensor:
            with torch.no_grad():
                if isinstance(layout, Regular) and layout.outer == 1:
                    start, stop, _ = examples.indices(layout.n)
                    rows = self.inputs(slice(start * layout.inner, stop * layout.inner))
                    return rows.unflatten(0, (stop - start, layout.inner)).flatten(1, 2)
                return layout.gather(self.inputs(slice(None)), 0).flatten(1, 2)[examples]

        # (k, n, positions, T, g, o) -> (n, k, T, g, o), a view wherever memory allows
        signals = layout.gather(rows, 1).flatten(2, 3).transpose(0, 1)
        return OuterSite(name, self.rule, frame, inputs, signals, self.fan_in, self.axes, self.order)

    def taped_site(self, name: str, frame: Frame | None, signal: Signal, first: int) -> Site:
        m = len(signal.values)
        arranged = self._arranged(signal.values)  # (m, k, rows of an example, T, g, o)
        each = arranged.shape[2]

        def inputs(examples: slice) -> Tensor:
            start, stop, _ = examples.indices(m)
            with torch.no_grad():
                rows = self.inputs(slice((first + start) * each, (first + stop) * each))
                return rows.unflatten(0, (stop - start, each)).flatten(1, 2)

        signals, factors = arranged.flatten(2, 3), self._factors(signal.product)
        return OuterSite(name, self.rule, frame, inputs, signals, self.fan_in, self.axes, self.order, factors)

    def _factors(self, product: Product | None) -> Factors | None:
        """Both sides of a product, arranged as the signals are, if one F serves all positions."""
        if product is None or product.own is None:
            return None
        shared, own = (self._arranged(side).flatten(2, 3) for side in (product.shared, product.own))
        alike = shared.shape[2] == 1 or bool((shared == shared[:, :, :1]).all())
        return Factors(shared[0, :, 0], own[:, 0]) if alike and shared.shape[2] else None

    def _arranged(self, signals: Tensor) -> Tensor:
        m, k = signals.shape[:2]
        if signals.stride(0) == 0 and m > 1:  # the same for all examples, and to stay so
            return self._arranged(signals[:1]).expand(m, -1, -1, -1, -1, -1)
        return self.arrange(signals.flatten(0, 1)[None])[0].unflatten(0, (m, k, -1))


@dataclass(frozen=True, eq=False)
class Lookup(Form):
    """``u = W[ids]``; rows whose id is ``ignored`` get no gradient."""

    ids: Tensor = None  # type: ignore[assignment]
    table: int = 0
    ignored: int | None = None

    def as_rows(self, signals: Tensor) -> Tensor:
        return signals.flatten(1, -2)

    def site(self, name: str, frame: Frame | None, rows: Tensor, layout: Layout) -> Site:
        ids = self.ids.reshape(-1)
        if self.ignored is not None:
            rows = rows * (ids != self.ignored)[None, :, None]
        signals = layout.gather(rows, 1).transpose(0, 1)
        return LookupSite(name, self.rule, frame, layout.gather(ids, 0), signals, self.table)

    def taped_site(self, name: str, frame: Frame | None, signal: Signal, first: int) -> Site:
        signals = signal.values
        ids = self.ids[first : first + len(signals)].reshape(len(signals), -1)
        signals = signals.reshape(*signals.shape[:2], ids.shape[1], signals.shape[-1])
        if self.ignored is not None:
            signals = signals * (ids != self.ignored)[:, None, :, None]
        return LookupSite(name, self.rule, frame, ids, signals, self.table)


@dataclass(frozen=True, eq=False)
class FixedNorm:
    """``y = γ (u - μ) / σ + β``, one number of each for a channel: a batch norm with fixed statistics."""

    gain: Float[Tensor, " o"] | None
    mean: Float[Tensor, " o"]
    variance: Float[Tensor, " o"]
    eps: float

    @property
    def spread(self) -> Float[Tensor, " o"]:
        """σ."""
        return (self.variance + self.eps).sqrt()


@dataclass(frozen=True, eq=False)
class Gain(Form):
    """``u = op(data, W)`` entry by entry, W broadcast as ``shape`` against u.

    ``factor()`` gives ∂u/∂W for each entry of u (None: one everywhere); ``norm`` is set for what is γ or β there.
    """

    shape: tuple[int, ...] = ()
    factor: Callable[[], Tensor] | None = None
    output_shape: tuple[int, ...] = ()
    norm: FixedNorm | None = None

    @property
    def _broadcast(self) -> tuple[int, ...]:
        return (1,) * (len(self.output_shape) - len(self.shape)) + self.shape

    @property
    def _leading(self) -> int:
        """Number of axes of u before the last run of axes that the weight fills: examples lie there."""
        trailing = list(takewhile(lambda size: size != 1, reversed(self._broadcast)))
        return len(self.output_shape) - len(trailing)

    def as_rows(self, signals: Tensor) -> Tensor:
        lead = self._leading
        return signals.reshape(len(signals), math.prod(self.output_shape[:lead]), math.prod(self.output_shape[lead:]))

    def site(self, name: str, frame: Frame | None, rows: Tensor, layout: Layout) -> Site | None:
        if isinstance(layout, Ragged):
            return self._ragged_site(name, frame, rows, layout)
        axes = _example_axis(self.output_shape[: self._leading], layout)
        if axes is None or self._broadcast[axes[0]] != 1:
            return None  # examples cross axes, or the weight has a row for each example of the batch
        axis, (outer, n, inner) = axes
        # u as (before, outer, n, inner, after...), the axes along which the weight was broadcast summed.
        shape = (*self.output_shape[:axis], outer, n, inner, *self.output_shape[axis + 1 :])
        sizes = (*self._broadcast[:axis], 1, n, 1, *self._broadcast[axis + 1 :])
        letters = LETTERS[: len(shape)]
        example = letters[axis + 1]
        kept = "".join(a for a, size in zip(letters, sizes, strict=True) if size != 1 and a != example)
        signals = rows.reshape(len(rows), *shape)
        if self.factor is not None:
            factor = self.factor().to(rows.dtype).reshape(shape)
            gradient = torch.einsum(f"Z{letters},{letters}->{example}Z{kept}", signals, factor)
        elif math.prod(shape) == n * math.prod(sizes[axis + 2 :]) * math.prod(sizes[:axis]):
            gradient = signals.movedim(axis + 2, 0)  # nothing to sum: keep sharing memory with the weight's signals
        else:
            gradient = torch.einsum(f"Z{letters}->{example}Z{kept}", signals)
        return RowSite(name, self.rule, frame, gradient.reshape(n, len(rows), -1))

    @property
    def keeps_signals(self) -> bool:
        return self.factor is None and not self._summed

    @property
    def _summed(self) -> list[int]:
        """Axes of each example along which the weight was broadcast."""
        return [axis for axis, size in enumerate(self._broadcast) if size == 1 and axis > 0]

    def taped_site(self, name: str, frame: Frame | None, signal: Signal, first: int) -> Site:
        signals = signal.values
        m, k = signals.shape[:2]
        axes = [1 + axis for axis in self._summed]
        if self.factor is not None:
            gradient = _summed_product(signals, self._whole_factor.to(signals.dtype)[first : first + m, None], axes)
        else:
            gradient = signals.sum(axes) if axes else signals
        return RowSite(name, self.rule, frame, gradient.reshape(m, k, -1))

    @cached_property
    def _whole_factor(self) -> Tensor:
        """The factor of all examples, made once for all parts of them."""
        assert self.factor is not None
        return self.factor().expand(self.output_shape)

    def _ragged_site(self, name: str, frame: Frame | None, rows: Tensor, layout: Ragged) -> Site | None:
        if math.prod(self._broadcast[: self._leading]) != 1:
            return None
        if self.factor is not None:
            rows = rows * self.factor().to(rows.dtype).reshape(rows.shape[1:])
        gradient = rows.new_zeros(len(rows), layout.n, rows.shape[2]).index_add_(1, layout.labels, rows)
        return RowSite(name, self.rule, frame, gradient.transpose(0, 1))


@dataclass(frozen=True, eq=False)
class Tap(Form):
    """The weight itself, where it carries an example axis of its own (an expanded class token).

    Every example sees the same function of the parameters, so ``single`` (the weight of one example) serves all.
    """

    rule: str = "expanded"
    shape: tuple[int, ...] = ()
    copies: frozenset[int] = frozenset()

    def as_rows(self, signals: Tensor) -> Tensor:
        return signals.reshape(len(signals), -1, 1)

    def per_example(self, rows: Tensor, layout: Layout) -> tuple[int, Tensor] | None:
        """The example axis and the gradients (n, k, entries of one example's copy)."""
        axes = _example_axis(self.shape, layout)
        if axes is None or axes[0] not in self.copies or axes[1] != (1, self.shape[axes[0]], 1):
            return None
        signals = rows.reshape(len(rows), *self.shape).movedim(axes[0] + 1, 1)
        return axes[0], signals.reshape(*signals.shape[:2], -1).transpose(0, 1)


def _summed_product(signals: Tensor, factor: Tensor, axes: list[int]) -> Tensor:
    """``Σ signals · factor`` over some axes of each example, a few at a time: their product stays in the cache."""
    if not axes:
        return signals * factor
    wide = torch.promote_types(signals.dtype, torch.float32)  # products of half precision are not rounded again
    each = signals[:1].numel() * wide.itemsize
    few = max(1, CACHED.get(signals.device.type, CACHED["cuda"]) // max(1, each))
    parts = zip(signals.split(few), factor.split(few), strict=True)
    return torch.cat([(s.to(wide) * f).sum(axes) for s, f in parts]).to(signals.dtype)


def elementwise_factor(func: Callable[..., Any], args: Any, kwargs: Any, place: int, shape: torch.Size) -> Tensor:
    """∂u/∂W entry by entry for ``u = func(*args)`` with the weight at ``args[place]``, by autograd on W expanded."""
    with torch.enable_grad():
        detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
        # With complex data the factor is complex, whatever the weight; a real weight takes the real part at the end.
        mixed = torch.result_type(
            detached[place], next((a for a in detached if torch.is_tensor(a) and a.is_complex()), 0)
        )
        wide = detached[place].to(mixed).expand(shape).requires_grad_()
        detached[place] = wide
        output = func(*detached, **kwargs)
        return torch.autograd.grad(output, wide, torch.ones_like(output))[0]


def _example_axis(shape: tuple[int, ...], layout: Layout) -> tuple[int, tuple[int, int, int]] | None:
    """The axis of u that the examples lie on, and its split (outer, n, inner); None where they cross axes."""
    if not isinstance(layout, Regular):
        return None
    before = 1
    for axis, size in enumerate(shape):
        after = math.prod(shape[axis + 1 :])
        outer, inner = layout.outer // before if before else 0, layout.inner // after if after else 0
        if outer * before == layout.outer and inner * after == layout.inner and outer * layout.n * inner == size:
            return axis, (outer, layout.n, inner)
        before *= size
    return None
