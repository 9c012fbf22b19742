"""Signals that split into a factor of the output and one of the example: ``s_{μcp,o} = F_{co} m_{μp,o}``.

A layer has such signals when what follows it acts channel by channel (activation, batch norm, a residual sum, pooling)
until a linear head: the last convolutions of most residual networks. Their gradients are ``F_co H_μo`` with
``H_μo = Σ_p m_{μp,o} v_μp``, one row an example instead of one an output, and

    K_{μc,νd} = Σ_o F_co F_do (H_μo · H_νo)

costs C² times fewer operations. Capture knows such signals from the way they came (``gramscope.capture.tape``).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from gramscope.capture import OuterSite, Site
from gramscope.capture.sites import in_own_axes
from gramscope.kernels.pieces import HELD, Range, strips


@dataclass(frozen=True, eq=False)
class Split:
    """F, and the site with m for its signals: one direction."""

    factors: Float[Tensor, "k g o"]
    site: OuterSite

    def scaled(self, weights: Float[Tensor, "g o"]) -> OuterSite:
        return replace(self.site, signals=self.site.signals * weights)


def split_site(site: OuterSite) -> Split | None:
    """None where the signals of the site are not known to be such a product."""
    if site.factors is None:
        return None
    of_direction, of_example = site.factors.of_direction, site.factors.of_example
    return Split(of_direction, replace(site, signals=of_example[:, None], factors=None))


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


class PairedPiece:
    """``K = Q ∘ (S Sᵀ)`` at one position an example: ``K_{μc,νd} = Q_μν Σ_o F_co F_do m_μo m_νo``.

    The sum is the same for (c, d) and (d, c), and so it is taken for the k (k + 1) / 2 pairs of outputs only.
    """

    def __init__(
        self, inner: Float[Tensor, "n m"], left: Float[Tensor, "n o"], right: Float[Tensor, "m o"],
        factors: Float[Tensor, "k o"],
    ) -> None:  # fmt: skip
        self.inner, self.left, self.right, self.outputs = inner, left, right, len(factors)
        c, d = torch.triu_indices(self.outputs, self.outputs, device=factors.device)
        self.both = factors[c] * factors[d]  # (pairs, o)
        place = torch.empty(self.outputs, self.outputs, dtype=torch.int64, device=factors.device)
        place[c, d] = place[d, c] = torch.arange(len(c), device=factors.device)
        self.place = place.flatten()

    def add(self, out: Tensor, rows: Range, cols: Range) -> None:
        k = self.outputs
        weighted = self.left[rows[0] : rows[1], None] * self.both  # (n, pairs, o)
        by_pair = (self.right[cols[0] : cols[1]] @ weighted.flatten(0, 1).T).unflatten(1, (-1, len(self.both)))
        by_pair.mul_(self.inner[rows[0] : rows[1], cols[0] : cols[1]].T[..., None])  # (m, n, pairs)
        share = by_pair.index_select(2, self.place).unflatten(2, (k, k))
        out.unflatten(0, (-1, k)).unflatten(2, (-1, k)).add_(share.permute(1, 2, 0, 3))
