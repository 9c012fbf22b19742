"""Inner products of the Gram matrices of many layers, in one pass, exactly, in the cheaper of two forms.

With rows centred over the whole data set, K_i = X_i X_iᵀ and r_i the diagonal of K_i, everything CKA needs is
``⟨K_i, K_j⟩ = |X_iᵀX_j|²``, ``Σ_μ r_i r_j`` and ``Σ_μ r_i``. The state keeps rows while they take less memory than
moments of all P features, and moments (with some rows not yet added) from then on. Rows are contracted over all pairs
of examples, or made moments in the end, whichever costs less.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.base.moments import Centre
from gramscope.base.rounding import EPS64, Rounding
from gramscope.measures.rows import Rows

TILE_BYTES = 16 * 2**20
MOMENT_BYTES = 2**30  # of a scatter matrix that is made where rows would do
PANEL = 512
# A product of (L, tile²) with itself is thin and runs at less than half the rate of a square one (measured on a CPU).
THIN = 2.5


@dataclass(frozen=True, eq=False)
class GramProducts:
    """``inner`` ⟨K_i, K_j⟩, ``diagonals`` Σ r_i r_j, ``traces`` Σ r_i of n centred examples; ``means`` |mean_i|².

    Where ``traces`` are at rounding level beside n · ``means``, the layer is constant.
    """

    n: int
    inner: Float[Tensor, "L L"]
    diagonals: Float[Tensor, "L L"]
    traces: Float[Tensor, " L"]
    means: Float[Tensor, " L"] = field(repr=False)

    def hsic(self, *, debiased: bool) -> Float[Tensor, "L L"]:
        """HSIC of all pairs, up to the factor that CKA divides out.

        Biased ``|XᵀY|²``; debiased HSIC₁ · n(n-3) = ``|XᵀY|² - n/(n-2) Σrs + ΣrΣs/((n-1)(n-2))``, which is the
        one-pass formula with Σx = Σy = 0 (HSIC₁ does not change when features are shifted).
        """
        if not debiased:
            return self.inner
        n = self.n
        outer = torch.outer(self.traces, self.traces)
        return self.inner - self.diagonals * (n / (n - 2)) + outer / ((n - 1) * (n - 2))

    def degenerate(self, roundings: Sequence[Rounding], *, debiased: bool) -> list[str]:
        """For each layer, why its HSIC with itself vanishes; an empty string where it does not."""
        rounding = 1e3 * EPS64
        entries = self.means.new_tensor([max(rounding, layer.relative) for layer in roundings])
        constant = self.traces <= entries.square() * self.n * self.means
        own = self.hsic(debiased=debiased).diagonal()
        scale = self.inner.diagonal() + self.diagonals.diagonal()
        vanishing = own <= rounding * scale if debiased else own <= 0
        return [
            "has the same features for all examples (zero variance, up to rounding)" if is_constant
            else "has a Gram matrix that is constant off its diagonal, so nothing is left once debiased" if vanishes
            else ""
            for is_constant, vanishes in zip(constant.tolist(), vanishing.tolist(), strict=True)
        ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Moments of P features in L layers about their mean, as far as Σ r_i r_j needs them.

    ``scatter`` Σ z zᵀ (P, P); ``thirds`` Σ r_i z (L, P); ``fourths`` Σ r_i r_j (L, L); z = x - mean, r_i = |z_i|².
    """

    n: int
    widths: tuple[int, ...]
    centre: Centre
    scatter: Float[Tensor, "P P"]
    thirds: Float[Tensor, "L P"]
    fourths: Float[Tensor, "L L"]

    @classmethod
    def of(cls, x: Float[Tensor, "n P"], widths: tuple[int, ...]) -> "LayerMoments":
        centre = Centre.of(x)
        z = centre.centred(x)
        r = _per_layer(z.square(), widths)
        return cls(len(x), widths, centre, _scatter(z), r.mT @ z, r.mT @ r)

    def merged(self, other: "LayerMoments") -> "LayerMoments":
        """Both sets about their common mean; the shift is exact, since S, T and Q close under it."""
        n, gap = self.n + other.n, self.centre.gap(other.centre)
        step = gap * (other.n / n)
        a = self._about(step)
        b = other._about((-gap * (self.n / n)).to(other.scatter))
        scatter, thirds, fourths = (x + y.to(x) for x, y in zip(a, b, strict=True))
        return LayerMoments(n, self.widths, self.centre.moved(step), scatter, thirds, fourths)

    def _about(self, shift: Float[Tensor, " P"]) -> tuple[Tensor, Tensor, Tensor]:
        """Scatter, thirds and fourths about another centre, δ = ``shift`` from the mean, about which Σ z = 0."""
        squares = _per_layer(shift.square()[None], self.widths)[0]
        traces = self.traces()
        along = torch.stack(
            [
                block @ part
                for block, part in zip(self.scatter.split(self.widths, 1), shift.split(self.widths), strict=True)
            ]
        )  # (L, P): Σ z (z_i·δ_i)
        scatter = self.scatter + self.n * torch.outer(shift, shift)
        thirds = self.thirds - torch.outer(traces + self.n * squares, shift) - 2 * along
        third = _per_layer(self.thirds * shift, self.widths)  # (L, L): Σ r_i (z_j·δ_j)
        crossed = torch.outer(traces, squares)
        fourths = (
            self.fourths
            - 2 * (third + third.mT)
            + 4 * _per_layer(along * shift, self.widths)
            + crossed
            + crossed.mT
            + self.n * torch.outer(squares, squares)
        )
        return scatter, thirds, fourths

    def traces(self) -> Float[Tensor, " L"]:
        return _per_layer(self.scatter.diagonal()[None], self.widths)[0]

    def block(self, i: int, j: int) -> Float[Tensor, "p q"]:
        """Centred X_iᵀX_j."""
        starts = [0, *torch.tensor(self.widths, device="cpu").cumsum(0).tolist()]
        return self.scatter[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]

    def products(self) -> GramProducts:
        blocks = _per_layer(_per_layer(self.scatter.square(), self.widths).mT, self.widths)
        means = _per_layer(self.centre.mean.square()[None], self.widths)[0]
        return GramProducts(self.n, (blocks + blocks.mT) / 2, self.fourths, self.traces(), means)


@dataclass(frozen=True, eq=False)
class LayerState:
    """What is kept of the layers ``names``: their rows while these are small, then moments and the newest rows."""

    names: tuple[str, ...]
    rows: tuple[Rows, ...]
    moments: LayerMoments | None = None

    @classmethod
    def of(cls, layers: dict[str, Tensor]) -> "LayerState":
        rows = tuple(Rows.of(x, name) for name, x in layers.items())
        for name, kept in zip(layers, rows, strict=True):
            if kept.n != rows[0].n:
                raise InputError(
                    f"all features must have one row for each of the same examples, got {rows[0].n} rows in "
                    f"{next(iter(layers))!r} and {kept.n} in {name!r}. Reduce them alike (pool or flatten, not unfold)."
                )
        return cls(tuple(layers), rows)._compact()

    @property
    def n(self) -> int:
        return self.rows[0].n + (0 if self.moments is None else self.moments.n)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(kept.width for kept in self.rows)

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        return tuple(kept.rounding for kept in self.rows)

    def merged(self, other: "LayerState") -> "LayerState":
        if self.names != other.names or self.widths != other.widths:
            raise InputError(
                "states of the same layers and widths can be merged, got "
                f"{dict(zip(self.names, self.widths, strict=True))} and "
                f"{dict(zip(other.names, other.widths, strict=True))}."
            )
        rows = tuple(x.merged(y) for x, y in zip(self.rows, other.rows, strict=True))
        moments = self.moments if other.moments is None else other.moments
        if self.moments is not None and other.moments is not None:
            moments = self.moments.merged(other.moments)
        return LayerState(self.names, rows, moments)._compact()

    def products(self) -> GramProducts:
        """⟨K_i, K_j⟩ and what debiasing needs, over all examples merged so far."""
        n, size, layers = self.n, sum(self.widths), len(self.names)
        cheaper = n * (size + THIN * layers**2) > size**2 and 8 * size**2 <= MOMENT_BYTES
        return self.all_moments().products() if self.moments is not None or cheaper else tiled_products(self.rows)

    def all_moments(self) -> LayerMoments:
        """Moments of everything merged so far."""
        if self.rows[0].n == 0 and self.moments is not None:
            return self.moments
        device = self.rows[0].device
        newest = LayerMoments.of(torch.cat([kept.all().to(device) for kept in self.rows], 1), self.widths)
        return newest if self.moments is None else self.moments.merged(newest)

    def _compact(self) -> "LayerState":
        """Rows beyond the size of the moments go into them; with moments there, a quarter of that is enough."""
        size = sum(self.widths)
        allowed = 8 * size * (size + len(self.names)) / (1 if self.moments is None else 4)
        if sum(kept.nbytes for kept in self.rows) <= allowed:
            return self
        empty = tuple(replace(kept, chunks=()) for kept in self.rows)
        return LayerState(self.names, empty, self.all_moments())


def tiled_products(rows: tuple[Rows, ...]) -> GramProducts:
    """The products over pairs of examples: tiles of all Gram matrices at once, one (L, tile²) product for all pairs."""
    n, layers, device = rows[0].n, len(rows), rows[0].device
    size = min(max(int(math.sqrt(TILE_BYTES / 8 / layers)), 32), max(n, 1))
    inner = torch.zeros((layers, layers), dtype=torch.float64, device=device)
    centres = [kept.centre().to(inner) for kept in rows]
    r = torch.zeros((layers, n), dtype=torch.float64, device=device)
    tile = torch.empty(layers * size * size, dtype=torch.float64, device=device)
    for top in range(0, n, size):
        height = min(size, n - top)
        for left in range(top, n, size):
            width = min(size, n - left)
            grams = tile[: layers * height * width].view(layers, height, width)
            for i, (kept, centre) in enumerate(zip(rows, centres, strict=True)):
                a = centre.centred(kept.block(top, top + size).to(device))
                b = a if left == top else centre.centred(kept.block(left, left + size).to(device))
                torch.mm(a, b.mT, out=grams[i])
            flat = grams.flatten(1)
            inner.addmm_(flat, flat.mT, alpha=1.0 if left == top else 2.0)
            if left == top:
                r[:, top : top + height] = grams.diagonal(dim1=1, dim2=2)
    squares = torch.stack([centre.mean.square().sum() for centre in centres])
    return GramProducts(n, (inner + inner.mT) / 2, r @ r.mT, r.sum(1), squares)


def _scatter(z: Float[Tensor, "n P"]) -> Float[Tensor, "P P"]:
    """ZᵀZ; only blocks on and above the diagonal are multiplied."""
    size = z.shape[1]
    if size <= 2 * PANEL:
        return z.mT @ z
    scatter = torch.empty((size, size), dtype=z.dtype, device=z.device)
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        scatter[start:stop, start:] = z[:, start:stop].mT @ z[:, start:]
        scatter[stop:, start:stop] = scatter[start:stop, stop:].mT
    return scatter


def _per_layer(x: Float[Tensor, "k P"], widths: tuple[int, ...]) -> Float[Tensor, "k L"]:
    """Sums over the features of each layer."""
    return torch.stack([part.sum(-1) for part in x.split(widths, -1)], -1)
