"""Capture in parts: the signals of many positions are turned into gradient rows before they leave the cache.

Where a site has more positions than inputs (early convolutions), its gradient rows are smaller than its signals. Taking
a few examples at a time and keeping only the rows costs the same arithmetic and a fraction of the memory; on a CPU,
where fresh memory is slow to come by, it is faster too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gramscope.capture import LookupSite, OuterSite, RowSite, Site, Snapshot
from gramscope.capture.network import slice_examples
from gramscope.kernels.memory import fresh_zeros
from gramscope.kernels.pieces import strips


def capture_in_parts(take: Callable[[Any], Snapshot], x: Any, n: int, size: int) -> Snapshot:
    """A snapshot of all examples from captures of ``size`` at a time."""
    parts = []
    for start, stop in strips(n, size):
        snapshot = take(slice_examples(x, n, slice(start, stop)))
        sites = tuple(_compacted(site) for site in snapshot.sites)
        parts.append((sites, snapshot))
    joined = _join([sites for sites, _ in parts])
    if joined is None:  # the parts used their weights in different ways (routing, packing): take them together
        return take(x)
    first = parts[0][1]
    return Snapshot(
        sites=joined,
        outputs=torch.cat([snapshot.outputs for _, snapshot in parts]),
        directions=first.directions,
        parameters=first.parameters,
        frozen=first.frozen,
        fallback=first.fallback,
        unreached=first.unreached,
    )


def _compacted(site: Site) -> Site:
    if isinstance(site, OuterSite) and site.positions > site.fan_in:
        return RowSite(site.name, site.rule, site.frame, site.rows())
    return site


def _join(parts: Sequence[tuple[Site, ...]]) -> tuple[Site, ...] | None:
    if len({len(sites) for sites in parts}) != 1:
        return None
    joined = [_joined(uses) for uses in zip(*parts, strict=True)]
    complete = [site for site in joined if site is not None]
    return tuple(complete) if len(complete) == len(joined) else None


def _joined(uses: Sequence[Site]) -> Site | None:
    """One site over all examples; None where the parts do not match."""
    first = uses[0]
    if len({(type(use), use.name, use.rule, use.frame, use.entries) for use in uses}) != 1:
        return None
    if isinstance(first, RowSite):
        return RowSite(first.name, first.rule, first.frame, _stacked([use.rows() for use in uses]))
    if isinstance(first, OuterSite):
        outers = [use for use in uses if isinstance(use, OuterSite)]
        if len({use.positions for use in outers}) != 1:
            return None
        inputs, signals = _stacked([use.inputs for use in outers]), _stacked([use.signals for use in outers])
        return OuterSite(
            first.name, first.rule, first.frame, inputs.__getitem__, signals, first.fan_in, first.axes, first.order
        )
    lookups = [use for use in uses if isinstance(use, LookupSite)]
    if len({use.ids.shape[1] for use in lookups}) != 1:
        return None
    ids, signals = torch.cat([use.ids for use in lookups]), torch.cat([use.signals for use in lookups])
    return LookupSite(first.name, first.rule, first.frame, ids, signals, lookups[0].table)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return torch.cat(list(parts), out=fresh_zeros(shape, first.dtype, first.device))
