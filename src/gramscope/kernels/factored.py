"""Signals that split into a factor of the output and one of the example: ``s_{μcp,o} = F_{co} m_{μp,o}``.

A layer has such signals when what follows it acts channel by channel (activation, batch norm, a residual sum, pooling)
until a linear head: the last convolutions of most residual networks. Their gradients are ``F_co H_μo`` with
``H_μo = Σ_p m_{μp,o} v_μp``, one row an example instead of one an output, and

    K_{μc,νd} = Σ_o F_co F_do (H_μo · H_νo)

costs C² times fewer operations. Nothing is assumed about the network: the split is taken from the signals themselves,
and every entry is compared with it.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from gramscope.capture import OuterSite, Site
from gramscope.capture.sites import in_own_axes
from gramscope.kernels.pieces import HELD, Range, strips

# Largest difference between a signal and its product, in units of the dtype's ε and of the product. Signals come by a
# handful of roundings. Small outputs beside large ones are held to their own size: their kernel is as exact as any.
ROUNDINGS = 16
# A few positions of a few examples settle the question for nearly every site that does not split.
GLANCE = 8
# Signals that are compared at once: what stays in the CPU's nearer caches.
AT_ONCE = {"cpu": 2**18, "cuda": 2**40}


class Splitter:
    """Finds F from the first signals that are not zero, and holds later ones (of other examples) to it."""

    def __init__(self, like: Inexact[Tensor, "n k T g o"]) -> None:
        channels = like.shape[3:]
        self.factors: Float[Tensor, "k g o"] = like.new_zeros(like.shape[1], *channels)
        self._leading: Int[Tensor, "g o"] = torch.zeros(channels, dtype=torch.int64, device=like.device)
        self._silent: Int[Tensor, " silent"] = torch.arange(channels.numel(), device=like.device)

    def split(self, signals: Float[Tensor, "n k T g o"]) -> Float[Tensor, "n T g o"] | None:
        """m, where ``s = F m`` to rounding; None where the signals are no such product."""
        of_example = torch.empty_like(signals[:, 0])
        size = max(1, AT_ONCE.get(signals.device.type, AT_ONCE["cuda"]) // max(1, signals[0].numel()))
        self._learn(signals[:size])  # nearly all channels
        self._learn(signals[size:])
        each = (slice(*strip) for strip in strips(len(signals), size))
        return of_example if all(self._fits(signals[some], of_example[some]) for some in each) else None

    def _fits(self, signals: Float[Tensor, "n k T g o"], of_example: Float[Tensor, "n T g o"]) -> bool:
        """Are these signals products? Writes m: their part in the direction that is greatest in F, where F is one."""
        leading = self._leading.expand(len(signals), 1, signals.shape[2], *self._leading.shape)
        of_example.copy_(signals.gather(1, leading)[:, 0])
        m, tolerance = of_example[:, None], ROUNDINGS * torch.finfo(signals.dtype).eps
        rest = torch.addcmul(signals, self.factors[:, None], m, value=-1).abs_()
        excess = rest.addcmul_(self.factors[:, None].abs(), m.abs(), value=-tolerance)
        return bool(excess.max() <= 0)  # not so for NaN

    def _learn(self, signals: Float[Tensor, "n k T g o"]) -> None:
        """F of the channels that were silent until now, from the example and position where each is loudest, if any."""
        if self._silent.numel() == 0 or signals.numel() == 0:
            return
        silent = signals.flatten(3).index_select(3, self._silent)
        loudest, where = _greatest(silent).flatten(0, 1).max(dim=0)
        by_place = silent.transpose(1, 2).flatten(0, 1)  # (n·T, k, silent)
        there = by_place.gather(0, where.expand(1, by_place.shape[1], -1))[0]  # (k, silent)
        leading = there.abs().argmax(dim=0)
        speaks = loudest > 0
        ratios = torch.where(speaks, there / there.gather(0, leading[None]), 0.0)
        self.factors.view(len(ratios), -1).index_copy_(1, self._silent, ratios)
        self._leading.view(-1).index_copy_(0, self._silent, torch.where(speaks, leading, 0))
        self._silent = self._silent[~speaks]


def _greatest(signals: Float[Tensor, "n k T o"]) -> Float[Tensor, "n T o"]:
    """``max_c |s_c|``; on a CPU output by output, because a reduction over an inner axis is four times slower there."""
    if signals.device.type != "cpu":
        return signals.abs().amax(dim=1)
    greatest = signals[:, 0].abs()
    for direction in signals.unbind(1)[1:]:
        torch.maximum(greatest, direction.abs(), out=greatest)
    return greatest


def may_split(signals: Inexact[Tensor, "n k T g o"]) -> bool:
    """Is it worth a look at all the signals? Not for one output, nor where a few positions already say no."""
    n, k, positions = signals.shape[:3]
    if k == 1 or signals.numel() == 0 or signals.dtype not in (torch.float32, torch.float64):
        return False
    few = signals[n // 2 : n // 2 + 4, :, :: max(1, positions // GLANCE)]
    return Splitter(few).split(few) is not None


@dataclass(frozen=True, eq=False)
class Split:
    """F, and the site with m for its signals: one direction."""

    factors: Float[Tensor, "k g o"]
    site: OuterSite

    def scaled(self, weights: Float[Tensor, "g o"]) -> OuterSite:
        return replace(self.site, signals=self.site.signals * weights)


def split_site(site: OuterSite) -> Split | None:
    """None where the signals of the site are no such product."""
    if not may_split(site.signals):
        return None
    splitter = Splitter(site.signals)
    of_example = splitter.split(site.signals)
    return None if of_example is None else Split(splitter.factors, replace(site, signals=of_example[:, None]))


def by_factors(site: OuterSite) -> "FactoredSite | None":
    """The whole site by its factors, if it has any."""
    split = split_site(site)
    if split is None:
        return None
    rows = split.site.products().view(site.examples, site.groups, site.fan_out, site.fan_in)
    return FactoredSite(site.name, site.rule, site.frame, split.factors, rows, site.axes, site.order)


@dataclass(frozen=True, eq=False)
class FactoredSite(Site):
    """A weight whose gradients are ``F_co H_μo``; ``axes`` and ``order`` as those of an ``OuterSite``."""

    factors: Float[Tensor, "k g o"]
    gradient: Float[Tensor, "n g o i"]
    axes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def examples(self) -> int:
        return self.gradient.shape[0]

    @property
    def directions(self) -> int:
        return self.factors.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.gradient.dtype

    @property
    def entries(self) -> int:
        return self.gradient[0].numel()

    def channel_rows(self, channels: slice) -> Float[Tensor, "n k p"]:
        """Gradients of some output channels, in (g, o, i) order."""
        return (self.factors[None, :, :, channels, None] * self.gradient[:, None, :, channels]).flatten(2)

    def rows(self) -> Inexact[Tensor, "n k p"]:
        return in_own_axes(self.channel_rows(slice(None)), self.axes, self.order)


class FactoredPiece:
    """``K_{μc,νd} = Σ_o F_co F_do (H_μo · H_νo)``."""

    def __init__(
        self, left: Float[Tensor, "n o i"], right: Float[Tensor, "m o i"],
        factors: Float[Tensor, "k o"], others: Float[Tensor, "j o"],
    ) -> None:  # fmt: skip
        self.left, self.right = left.transpose(0, 1), right.transpose(0, 1)
        self.outputs = factors.shape[0], others.shape[0]
        self.both = (factors[:, None] * others).flatten(0, 1)  # (k·j, o)

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        k, j = self.outputs
        mine, theirs = self.left[:, rows[0] : rows[1]], self.right[:, cols[0] : cols[1]]
        by_example = out.unflatten(0, (-1, k)).unflatten(2, (-1, j))  # (n, k, m, j)
        each = sum(self.both.shape) * mine.shape[1] * out.element_size()
        held = HELD.get(out.device.type, HELD["cpu"])
        for start, stop in strips(theirs.shape[1], max(1, held // each)):
            by_channel = torch.bmm(mine, theirs[:, start:stop].mT)  # (o, n, m)
            share = (self.both @ by_channel.flatten(1)).view(k, j, *by_channel.shape[1:])
            by_example[:, :, start:stop].add_(share.permute(2, 0, 3, 1))
