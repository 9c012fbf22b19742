"""Dense kernels and their velocities, from the weight sites of the outputs and of their derivative along a direction.

``J v`` is a function of the parameters like the outputs themselves, so that the engine of :func:`gramscope.ntk` finds
the sites of its graph, too: they hold the rows of ``J̇ = D_v J``. And it is linear in v, with the derivative J: one
backward pass gives both sets of rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite
from gramscope.base.memory_budget import Memory, check_budget
from gramscope.capture.backward_graph import BackwardGraph, incoming
from gramscope.capture.capturing import unit_cotangents
from gramscope.capture.sites import LookupSite, OuterSite, RowSite, Site
from gramscope.capture.weight_sites import WeightSites
from gramscope.kernels.accumulate import Accumulator, Sites, summed_rows
from gramscope.kernels.contractions import strips
from gramscope.kernels.expansion import INFINITE, Expansion, Parameters, Tangent

# Tensors of the size of the signals that are held for each output: as they came, and arranged for their products.
OVERHEAD = 3
# Before the name of a parameter: the part of a direction that belongs to it.
ALONG = "along "


def dense_kernel(at: Expansion, memory: Memory) -> Float[Tensor, "u u"]:
    """``J λ Jᵀ``."""
    rows = _Rows(at, at.f)
    kernel = at.on_graph(lambda: _product(rows, rows, memory))
    return (kernel + kernel.T) / 2  # both halves are sums of the same numbers in another order


def dense_velocity(tangent: Tangent, memory: Memory) -> Float[Tensor, "u u"]:
    """``J̇ λ Jᵀ + J λ J̇ᵀ``, the derivative of the kernel along the direction of ``tangent``."""
    rows = _Rows(tangent, tangent.g, tangent.direction)
    moved = tangent.on_graph(lambda: _product(rows, _Rows(tangent, tangent.f), memory))
    check_finite(moved, "second derivatives of the outputs", INFINITE)
    return moved + moved.T


class _Rows:
    """Sites that hold the rows of ``J = ∂outputs/∂θ``; and those of ``∂outputs/∂v``, if they depend on a ``v``."""

    def __init__(self, at: Expansion, outputs: Float[Tensor, "n C"], v: Parameters = ()) -> None:
        self.expansion, self.outputs, self.v = at, outputs, v

    @cached_property
    def sites(self) -> WeightSites:
        names = [*self.expansion.parameters, *(f"{ALONG}{name}" for name in self.expansion.parameters)]
        leaves = dict(zip(names, (*self.expansion.leaves, *self.v), strict=False))
        # Coupled examples are as exact, with fewer sites.
        return WeightSites(BackwardGraph(self.outputs, leaves), lambda names: None)

    def bytes_per_output(self) -> int:
        signals = sum(shape.numel() * dtype.itemsize for shape, dtype in map(incoming, self.sites.edges))
        metric = self.expansion.metric
        weighted = (p.numel() for name, p in self.expansion.parameters.items() if metric[name].dim())
        return OVERHEAD * (signals + max(weighted, default=0) * self.expansion.examples * self.expansion.dtype.itemsize)

    def of_outputs(self, start: int, stop: int) -> Sites:
        found = self.sites.sites(unit_cotangents(self.expansion.f.detach(), slice(start, stop)))
        return {name: sites for group in found for name, sites in group.items()}

    def weighted(self, name: str, sites: Sequence[Site]) -> Sequence[Site]:
        """Sites that hold the rows of ``J λ``."""
        rate = self.expansion.metric[name]
        if rate.dim() == 0:
            return sites if rate == 1 else tuple(_scaled(site, float(rate)) for site in sites)
        rows = summed_rows(sites)
        rates = rate.expand(self.expansion.parameters[name].shape).flatten()
        return (RowSite(name, "weighted", None, rows * rates.to(rows)),)


def _product(left: _Rows, right: _Rows, memory: Memory) -> Float[Tensor, "u u"]:
    """The product of the rows of both, some outputs at a time, one parameter after the other."""
    expansion = left.expansion
    n, width = expansion.f.shape
    result = torch.zeros(n, width, n, width, dtype=expansion.dtype, device=expansion.device)
    each = left.bytes_per_output()
    least = 3 * result.nbytes + min(width, 2) * each  # one output's rows, and another's for the columns
    advice = "Choose fewer outputs or examples, or use the operator form, which holds no rows."
    budget = check_budget(least, memory, expansion.device, f"this kernel of {n * width} rows", advice)
    room = budget - 3 * result.nbytes
    blocks = list(strips(width, width if width * each <= room else room // (2 * each)))
    for rows in blocks:
        mine = left.of_outputs(*rows)
        for columns in blocks:
            theirs, along = mine, ALONG if left.v else ""
            if columns != rows:
                theirs, along = right.of_outputs(*columns), ""
            tile = result[:, slice(*rows), :, slice(*columns)]
            with torch.no_grad():
                accumulator = Accumulator({"": tile}, trace=False, symmetric=False, chunk=room // 8)
                for name in expansion.parameters:
                    if mine.get(name) and theirs.get(along + name):
                        accumulator.add({name: left.weighted(name, mine[name])}, {name: theirs[along + name]})
                accumulator.finish()
    return result.reshape(n * width, n * width)


def _scaled(site: Site, factor: float) -> Site:
    if isinstance(site, OuterSite | LookupSite):
        return replace(site, signals=site.signals * factor)
    assert isinstance(site, RowSite)
    return replace(site, gradient=site.gradient * factor)
