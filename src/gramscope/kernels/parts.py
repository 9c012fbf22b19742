"""Capture in parts: the signals of many positions are turned into gradient rows before they leave the cache.

Where a site has more positions than inputs (early convolutions), its gradient rows are smaller than its signals. Taking
a few examples at a time and keeping only the rows costs the same arithmetic and a fraction of the memory; on a CPU,
where fresh memory is slow to come by, it is faster too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramscope.base.pages import fresh_empty
from gramscope.capture import LookupSite, OuterSite, RowSite, Site, Snapshot
from gramscope.capture.capture import ByExample
from gramscope.capture.coupling import same_outputs
from gramscope.capture.network import slice_examples
from gramscope.capture.signals import Place
from gramscope.capture.sites import Factors
from gramscope.kernels.cost import Shape, cheapest, split_pays
from gramscope.kernels.factored import FactoredSite, split_site
from gramscope.kernels.pieces import strips

Take = Callable[[Any], Snapshot]
Opened = Callable[[Any], AbstractContextManager[ByExample]]
# Gradient rows up to this many times the size of the signals are worth making at once.
WIDER = 4


def capture_in_parts(take: Take, opened: Opened, x: Any, n: int, size: int, trace: bool) -> Snapshot:
    """A snapshot of all n examples, ``size`` at a time: from one forward pass where the network allows."""
    with opened(x) as one_pass:
        at_once = from_one_pass(one_pass, n, size, trace)
        if at_once is not None:
            return at_once
        outputs = one_pass.outputs
    parts = (take(slice_examples(x, n, slice(*part))) for part in strips(n, _even(n, size)))
    joined = _joined(_Joiner(n, trace, set()), parts)
    # Parts that used their weights in different ways (routing, packing), or whose examples give other outputs in other
    # company (dropout, an input that all share), are taken together.
    return take(x) if joined is None or not same_outputs(joined.outputs, outputs) else joined


def from_one_pass(one_pass: ByExample, n: int, size: int | None, trace: bool) -> Snapshot | None:
    """The same from a forward pass that was made; None where its examples can only be captured at once, and are not to.

    Without ``size`` all are captured at once, as they are.
    """
    if size is not None and one_pass.apart:
        return _streamed(one_pass, _Joiner(n, trace, one_pass.used_once), _even(n, size))
    return one_pass.whole() if size is None or size >= n else None


def _even(n: int, size: int) -> int:
    """Parts of n of nearly the same size."""
    return math.ceil(n / math.ceil(n / size))


def _streamed(one_pass: ByExample, joiner: "_Joiner", size: int) -> Snapshot:
    """Each site of a part is taken as soon as it is there: its signals are still in the cache, and then forgotten."""
    sites: dict[Place, _Joining] = {}
    for start, stop in strips(joiner.n, size):
        for place, site in one_pass.sites(slice(start, stop)):
            if place not in sites:
                sites[place] = joiner.begin(site)
            fits = sites[place].add(site, start)
            assert fits  # one forward pass used its weights in one way
    return one_pass.snapshot([sites[place].site() for place in sorted(sites)])


def _joined(joiner: "_Joiner", parts: Iterator[Snapshot]) -> Snapshot | None:
    first = next(parts)
    sites = [joiner.begin(site) for site in first.sites]
    outputs, edges = [first.outputs], [0, first.examples]
    fits = all(joining.add(site, 0) for joining, site in zip(sites, first.sites, strict=True))
    for part in parts:
        if not fits or len(part.sites) != len(sites):
            return None
        fits = all(joining.add(site, edges[-1]) for joining, site in zip(sites, part.sites, strict=True))
        outputs.append(part.outputs)
        edges.append(edges[-1] + part.examples)
    if not fits:
        return None
    return Snapshot(
        sites=tuple(joining.site() for joining in sites),
        outputs=torch.cat(outputs),
        directions=first.directions,
        parameters=first.parameters,
        frozen=first.frozen,
        fallback=first.fallback,
        unreached=first.unreached,
    )


@dataclass(frozen=True)
class _Joiner:
    """Decides how the parts of a site are kept: n examples in all, the parameters that may be kept by factors."""

    n: int
    trace: bool
    by_factors: set[str]

    def begin(self, site: Site) -> "_Joining":
        if isinstance(site, LookupSite):
            return _Lookups(site, self.n)
        if not isinstance(site, OuterSite):
            return _Rows(site, self.n)
        if site.factors is not None and site.name in self.by_factors and self._as_factors(site):
            return _Factored(site, site.factors, self.n)
        return _Rows(site, self.n) if self._as_rows(site) else _Outers(site, self.n)

    def _as_rows(self, site: OuterSite) -> bool:
        """Will the kernel be contracted from gradient rows, and are these not much larger than the signals?"""
        return site.fan_in <= WIDER * site.positions and cheapest(self._shape(site)) == "rows"

    def _as_factors(self, site: OuterSite) -> bool:
        """Will it be contracted from one row an example, not much larger than its signals?"""
        shape = self._shape(site)
        rows = not self.trace or cheapest(replace(shape, k=1)) == "rows"
        small = site.fan_in <= WIDER * site.positions * site.directions
        return rows and small and split_pays(shape)

    def _shape(self, site: OuterSite) -> Shape:
        return Shape(n=self.n, m=self.n, k=site.directions, T=site.positions, g=site.groups, i=site.fan_in,
                     o=site.fan_out, symmetric=True, trace=self.trace)  # fmt: skip


class _Joining:
    """One site over all examples, filled part by part."""

    def __init__(self, first: Site, n: int) -> None:
        # Not the site itself, whose signals would stay in memory with it.
        self.kind, self.n = _kind(first), n
        self.name, self.rule, self.frame = first.name, first.rule, first.frame

    def add(self, site: Site, start: int) -> bool:
        """Take the part of the examples from ``start`` on; False where it does not match the first."""
        return _kind(site) == self.kind

    def site(self) -> Site:
        raise NotImplementedError


def _kind(site: Site) -> tuple[object, ...]:
    kind = type(site), site.name, site.rule, site.frame, site.entries
    return (*kind, site.axes, site.order, site.groups, site.fan_in) if isinstance(site, OuterSite) else kind


class _Rows(_Joining):
    """Gradients as rows, in memory of their own from the start."""

    def __init__(self, first: Site, n: int) -> None:
        super().__init__(first, n)
        some = first.signals if isinstance(first, OuterSite) else first.rows()
        self.gradient = fresh_empty((n, first.directions, first.entries), some.dtype, some.device)

    def add(self, site: Site, start: int) -> bool:
        if not super().add(site, start):
            return False
        place = self.gradient[start : start + site.examples]
        if isinstance(site, OuterSite):
            site.rows(out=place)
        else:
            place.copy_(site.rows())
        return True

    def site(self) -> Site:
        return RowSite(self.name, self.rule, self.frame, self.gradient)


class _Factored(_Joining):
    """Gradients by the factors of their signals."""

    def __init__(self, first: OuterSite, factors: Factors, n: int) -> None:
        super().__init__(first, n)
        self.factors, self.axes, self.order = factors.of_direction, first.axes, first.order
        shape = n, first.groups, first.fan_out, first.fan_in
        self.gradient = fresh_empty(shape, first.signals.dtype, first.signals.device)

    def add(self, site: Site, start: int) -> bool:
        if not super().add(site, start) or not isinstance(site, OuterSite) or (split := split_site(site)) is None:
            return False
        split.site.products(out=self.gradient[start : start + site.examples].flatten(1)[:, None])
        return True

    def site(self) -> Site:
        return FactoredSite(self.name, self.rule, self.frame, self.factors, self.gradient, self.axes, self.order)


class _Outers(_Joining):
    """Signals in memory of their own; inputs are made by the parts, when they are asked for."""

    def __init__(self, first: OuterSite, n: int) -> None:
        super().__init__(first, n)
        o = first.signals  # (n, k, T, g, o), kept in the order of memory that convolutions give: T last
        self.signals = fresh_empty((n, *(o.shape[a] for a in (1, 3, 4, 2))), o.dtype, o.device).permute(0, 1, 4, 2, 3)
        self.positions, self.fan_in, self.axes, self.order = first.positions, first.fan_in, first.axes, first.order
        self.inputs: list[tuple[int, int, Callable[[slice], Tensor]]] = []
        self.factors: list[Factors | None] = []

    def add(self, site: Site, start: int) -> bool:
        if not super().add(site, start) or not isinstance(site, OuterSite) or site.positions != self.positions:
            return False
        stop = start + site.examples
        self.signals[start:stop] = site.signals
        self.inputs.append((start, stop, site.make_inputs))
        self.factors.append(site.factors)
        return True

    def site(self) -> Site:
        parts, n = self.inputs, self.n

        def inputs(examples: slice) -> Tensor:
            start, stop, _ = examples.indices(n)
            found = [
                make(slice(max(start, low) - low, min(stop, high) - low))
                for low, high, make in parts
                if max(start, low) < min(stop, high)
            ]
            return found[0] if len(found) == 1 else torch.cat(found)

        return OuterSite(
            self.name, self.rule, self.frame, inputs, self.signals, self.fan_in, self.axes, self.order,
            _one_side(self.factors),
        )  # fmt: skip


def _one_side(parts: Sequence[Factors | None]) -> Factors | None:
    """The factors of all examples from those of parts, which share the side of the direction."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Factors(known[0].of_direction, torch.cat([part.of_example for part in known]))


class _Lookups(_Joining):
    """Ids and signals."""

    def __init__(self, first: LookupSite, n: int) -> None:
        super().__init__(first, n)
        self.ids = first.ids.new_zeros(n, first.ids.shape[1])
        self.signals = fresh_empty((n, *first.signals.shape[1:]), first.signals.dtype, first.signals.device)
        self.table = first.table

    def add(self, site: Site, start: int) -> bool:
        if not super().add(site, start) or not isinstance(site, LookupSite) or site.ids.shape[1] != self.ids.shape[1]:
            return False
        stop = start + site.examples
        self.ids[start:stop], self.signals[start:stop] = site.ids, site.signals
        return True

    def site(self) -> Site:
        return LookupSite(self.name, self.rule, self.frame, self.ids, self.signals, self.table)
