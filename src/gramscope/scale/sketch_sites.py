"""The sketch of one parameter's gradient, from the inputs and signals of its sites.

A parameter is seen as a matrix of R x C entries, and its gradient G (R, C) of every example and direction becomes
``φ = P_Rᵀ G P_C``. With ``G = Σ_T s ⊗ v`` this is ``Σ_T (P_Rᵀ s) ⊗ (P_Cᵀ v)``, and G is never made. All uses of a
parameter (tied weights, reused modules, parts of a packed projection) meet the same rows of the same matrices, so that
the sketch of their sum is the sum of their sketches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gramscope.capture import LookupSite, OuterSite, Site
from gramscope.capture.weight_sites import WIDE
from gramscope.scale.sketch_cost import SketchShape, formed_is_cheaper

BYTES_AT_ONCE = {"cpu": 2**24, "cuda": 2**30}  # of projected inputs and signals, or of gradients


@dataclass(frozen=True)
class MatrixShape:
    """A parameter of shape ``shape`` as a matrix: the axes before ``split`` are its rows, the others its columns."""

    shape: tuple[int, ...]
    split: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: self.split])

    @property
    def columns(self) -> int:
        return math.prod(self.shape[self.split :])

    def sketched(self, size: int) -> tuple[int, int]:
        """Rows and columns of a sketch of at most ``size``² numbers; the shorter side is kept whole if it can be.

        >>> MatrixShape((512, 256), 1).sketched(16), MatrixShape((10, 784), 1).sketched(16)
        ((16, 16), (10, 25))
        >>> MatrixShape((100,), 1).sketched(16)
        (100, 1)
        """
        shorter = min(self.rows, self.columns, size)
        longer = min(max(self.rows, self.columns), size**2 // shorter)
        return (shorter, longer) if self.rows <= self.columns else (longer, shorter)

    def sketched_apart(self, size: int) -> tuple[int, int]:
        """The same where the two sides are held apart: each may have ``size``² numbers.

        >>> MatrixShape((10, 784), 1).sketched_apart(16)
        (10, 256)
        """
        return min(self.rows, size**2), min(self.columns, size**2)


@dataclass(frozen=True, eq=False)
class Factors:
    """The matrices of a parameter: ``rows`` (R, ρ, b) and ``columns`` (C, ρ, a) for each of ρ repeats.

    A side in ``whole`` is not projected: its matrix is the identity, held as a shape only, with ρ = 1.
    """

    matrix: MatrixShape
    rows: Float[Tensor, "R _ b"]
    columns: Float[Tensor, "C _ a"]
    whole: frozenset[str] = frozenset()

    @property
    def repeats(self) -> int:
        """Independent repeats; 1 where neither side is random, since all would be the same."""
        return max(self.rows.shape[1], self.columns.shape[1])

    @property
    def entries(self) -> int:
        """Numbers in one sketch."""
        return self.rows.shape[2] * self.columns.shape[2]

    def onto(
        self, side: Literal["rows", "columns"], values: Float[Tensor, "*batch g d"], places: Int[Tensor, "g d"]
    ) -> Float[Tensor, "*batch g rho m"]:
        """Values that lie at ``places`` of a side, projected: each group meets its own rows of the matrix."""
        factor = self.rows if side == "rows" else self.columns
        values = values.to(factor.dtype)
        if side in self.whole:
            spread = values.new_zeros(*values.shape[:-1], len(factor))
            return spread.scatter_(-1, places.expand_as(values), values).unsqueeze(-2)
        own = factor[places].flatten(2)  # (g, d, ρ·m)
        if len(own) == 1:
            product = (values[..., 0, :] @ own[0])[..., None, :]
        else:
            product = torch.einsum("...gd,gdm->...gm", values, own)
        return product.unflatten(-1, factor.shape[1:])

    def every(self, side: Literal["rows", "columns"]) -> Int[Tensor, "1 d"]:
        """All places of a side, as one group."""
        factor = self.rows if side == "rows" else self.columns
        return torch.arange(len(factor), device=factor.device)[None]


@dataclass(frozen=True, eq=False)
class Placement:
    """Which row of the matrix each signal of a site belongs to and which column each input; ``turned``: vice versa."""

    signals: Int[Tensor, "g o"]
    inputs: Int[Tensor, "g i"]
    turned: bool


def placed(site: OuterSite, matrix: MatrixShape) -> Placement | None:
    """Where the entries of a weight lie in the parameter's matrix; None where inputs and signals share an axis of it.

    Entry (g, o, i) of the weight is number E(g, o, i) of the parameter, in row E // C and column E % C. The outer
    product stays one if the row is a function of (g, o) and the column one of (g, i), or the other way round.
    """
    along_o, along_i, whole = _entries(site)  # E(g, o, 0), E(g, 0, i)
    width = matrix.columns
    for turned, by_row, by_column in ((False, along_o, along_i), (True, along_i, along_o)):
        rows, columns = by_row // width, by_column % width
        if whole is None:
            fits = bool((by_row % width == columns[:, :1]).all() and (by_column // width == rows[:, :1]).all())
        else:
            pair = rows * width, columns
            fits = torch.equal(pair[turned][:, :, None] + pair[not turned][:, None, :], whole)
        if fits:
            return Placement(columns if turned else rows, rows if turned else columns, turned)
    return None


def _entries(site: OuterSite) -> tuple[Int[Tensor, "g o"], Int[Tensor, "g i"], Int[Tensor, "g o i"] | None]:
    """Numbers of the parameter's entries along o and along i, and all of them where the weight is a view."""
    g, o, i = site.groups, site.fan_out, site.fan_in
    device = site.signals.device
    if site.frame is None:
        stride, strides = 1, [0] * len(site.axes)
        for axis in reversed(site.order):
            strides[axis] = stride
            stride *= site.axes[axis]
        by_group, by_o, by_i = strides if len(strides) == 3 else (0, *strides)
        base = torch.arange(g, device=device)[:, None] * by_group
        return (
            base + torch.arange(o, device=device) * by_o,
            base + torch.arange(i, device=device) * by_i,
            None,
        )
    own = site.frame.entries.to(device).reshape([site.axes[axis] for axis in site.order])
    back = sorted(range(len(site.order)), key=site.order.__getitem__)
    whole = own.permute(back).reshape(g, o, i)
    return whole[:, :, 0], whole[:, 0], whole


def choose_matrix(shape: tuple[int, ...], sites: Sequence[Site]) -> MatrixShape:
    """The parameter as a matrix in which its sites stay outer products; one row for each index of axis 0 otherwise."""
    outer = [site for site in sites if isinstance(site, OuterSite) and site.entries]
    for split in range(1, len(shape)):
        matrix = MatrixShape(shape, split)
        if outer and all(placed(site, matrix) is not None for site in outer):
            return matrix
    return MatrixShape(shape, min(1, len(shape)))


def sketched(sites: Sequence[Site], factors: Factors) -> Float[Tensor, "rho n k d"]:
    """``P_Rᵀ G P_C`` of every example and direction, summed over the uses of a parameter, flattened; d = b·a."""
    total = _site(sites[0], factors)
    for site in sites[1:]:
        total = total + _site(site, factors)
    return total


def _site(site: Site, factors: Factors) -> Float[Tensor, "rho n k d"]:
    place = _how(site, factors)
    few = _examples_at_once(site, factors, formed=place is None)
    parts = []
    for start in range(0, site.examples, few):
        part = site.part(slice(start, start + few), slice(None))
        if isinstance(part, OuterSite) and isinstance(place, Placement):
            parts.append(_outer(part, place, factors))
        elif isinstance(part, LookupSite) and place is not None:
            parts.append(_lookup(part, factors))
        else:
            parts.append(_formed(part, factors))
    return torch.cat(parts, 1)


def _how(site: Site, factors: Factors) -> Placement | bool | None:
    """The way without the gradient, where there is one that is cheaper than to form it; None otherwise."""
    matrix = factors.matrix
    if isinstance(site, LookupSite):
        whole = site.frame is None and site.table == matrix.rows and site.signals.shape[3] == matrix.columns
        return True if whole else None
    if not isinstance(site, OuterSite) or formed_is_cheaper(sketch_shape(site, factors)):
        return None
    return placed(site, matrix)


def sketch_shape(site: OuterSite, factors: Factors) -> SketchShape:
    """The sizes by which the cost of a site's sketch is counted."""
    return SketchShape(
        k=site.directions, T=site.positions, g=site.groups, i=site.fan_in, o=site.fan_out, rows=factors.matrix.rows,
        columns=factors.matrix.columns, b=factors.rows.shape[2], a=factors.columns.shape[2], repeats=factors.repeats,
    )  # fmt: skip


def _examples_at_once(site: Site, factors: Factors, formed: bool) -> int:
    b, a = factors.rows.shape[2], factors.columns.shape[2]
    if formed:
        each = site.directions * factors.matrix.rows * (factors.matrix.columns + factors.repeats * a)
    else:
        positions = math.prod(site.held.shape[2:-1])
        fan_in = site.fan_in if isinstance(site, OuterSite) else 0
        each = positions * (fan_in + factors.repeats * max(a, b) * (1 + site.directions))
    limit = BYTES_AT_ONCE.get(site.held.device.type, BYTES_AT_ONCE["cuda"])
    return max(1, limit // max(1, each * factors.rows.dtype.itemsize))


def _outer(site: OuterSite, place: Placement, factors: Factors) -> Float[Tensor, "rho n k d"]:
    """``Σ_{T,g} (P_Rᵀ s) ⊗ (P_Cᵀ v)``."""
    signals, inputs = projected(site, place, factors)
    pattern = "nkprc,nprs->rnksc" if place.turned else "nkprs,nprc->rnksc"
    return torch.einsum(pattern, *_same_repeats(signals, inputs)).flatten(3)


def projected(
    site: OuterSite, place: Placement, factors: Factors
) -> tuple[Float[Tensor, "n k p _ m"], Float[Tensor, "n p _ w"]]:
    """Signals and inputs at p = T·g positions, each projected."""
    signals = factors.onto("columns" if place.turned else "rows", site.signals, place.signals)
    inputs = factors.onto("rows" if place.turned else "columns", site.inputs, place.inputs)
    return signals.flatten(2, 3), inputs.flatten(1, 2)


def _same_repeats(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """A side that is not projected is the same in all repeats, ρ on the last axis but one."""
    repeats = max(left.shape[-2], right.shape[-2])
    return tuple(side.expand(*side.shape[:-2], repeats, -1) for side in (left, right))  # type: ignore[return-value]


def _lookup(site: LookupSite, factors: Factors) -> Float[Tensor, "rho n k d"]:
    """``Σ_T P_R[id] ⊗ (P_Cᵀ s)``: the input of a table is a one-hot vector, whose projection is a row of P_R."""
    signals = factors.onto("columns", site.signals[..., None, :], factors.every("columns")).squeeze(3)
    one = torch.ones_like(site.ids, dtype=factors.rows.dtype)[..., None]
    if "rows" in factors.whole:
        rows = one.new_zeros(*site.ids.shape, len(factors.rows)).scatter_(-1, site.ids[..., None], one)[..., None, :]
    else:
        rows = factors.rows[site.ids]
    return torch.einsum("nktra,ntrb->rnkba", *_same_repeats(signals, rows)).flatten(3)


def _formed(site: Site, factors: Factors) -> Float[Tensor, "rho n k d"]:
    """The gradient first: ``P_Rᵀ G P_C``."""
    gradient = site.whole_rows().to(factors.rows.dtype)
    matrices = gradient.unflatten(2, (factors.matrix.rows, factors.matrix.columns))  # (n, k, R, C)
    half = factors.onto("columns", matrices[..., None, :], factors.every("columns")).squeeze(3)  # (n, k, R, ρ, a)
    if "rows" in factors.whole:
        return half.permute(3, 0, 1, 2, 4).flatten(3)
    half = half.expand(*half.shape[:3], factors.repeats, -1)
    return torch.einsum("nkRra,Rrb->rnkba", half, factors.rows).flatten(3)


def sketched_apart(site: OuterSite, factors: Factors) -> tuple[Float[Tensor, "_ n k m"], Float[Tensor, "_ n 1 w"]]:
    """Projected signals and inputs of a site with one position, whose sketch is their outer product."""
    place = placed(site, factors.matrix)
    assert place is not None, "may_be_apart has seen to it"
    signals, inputs = projected(site, place, factors)  # (n, k, 1, ρ, m), (n, 1, ρ, w)
    return signals[:, :, 0].permute(2, 0, 1, 3), inputs.permute(2, 0, 1, 3)


def may_be_apart(sites: Sequence[Site], matrix: MatrixShape) -> bool:
    """Whether a parameter has one use at one position, so that ``⟨φ, φ'⟩ = ⟨s, s'⟩⟨v, v'⟩`` with both sides projected.

    Wide layers are left out: capture may see them as lookups in one batch and not in the next.
    """
    site = sites[0] if len(sites) == 1 else None
    if not isinstance(site, OuterSite) or site.positions != 1 or site.groups != 1 or site.fan_out >= min(WIDE.values()):
        return False
    return site.frame is None and site.entries > 0 and placed(site, matrix) is not None
