"""All tails of some spectra: α and the distance D at every lower end xmin, and the least D without all of them."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from gramscope.base.errors import InputError

Convention = Literal["gramscope", "weightwatcher"]

_WEIGHTWATCHER_CUT = 1e-5
_WEIGHTWATCHER_FEW, _WEIGHTWATCHER_TAIL = 20, 8
# Points of a tail at which the distance is looked at, first in all tails, then in those that may still win.
_PROBES = (5, 24)
_MARGIN = 1e-12  # a bound and its D agree only to rounding
_CHUNK = 4096


@dataclass(frozen=True)
class Tails:
    """Spectra as rows, ascending; the i-th eigenvalue of a row is the xmin of its i-th tail, with ``counts[i]`` values.

    What lies below a row's cut is in no tail. Looking at D at a few points of a tail bounds it from below, which spares
    most of the n²/2 terms of all tails.
    """

    x: Float64[np.ndarray, "rows n"]
    logs: Float64[np.ndarray, "rows n"]  # ln(x / x_max), so that equal greatest eigenvalues differ by exactly nothing
    alpha: Float64[np.ndarray, "rows candidates"]
    valid: Bool[np.ndarray, "rows candidates"]
    counts: Int64[np.ndarray, " candidates"]
    kept: Int64[np.ndarray, " rows"]  # eigenvalues above the cut
    least: Int64[np.ndarray, " rows"]  # the fewest that a tail must have

    @classmethod
    def of(cls, ascending: Float64[np.ndarray, "rows n"], convention: Convention, min_tail: int) -> "Tails":
        """The tails of ascending spectra; what is below λ_max · n · ε (WeightWatcher: below 1e-5) counts as zero."""
        if min_tail < 2:
            raise InputError(f"min_tail must be at least 2, got {min_tail}. One eigenvalue has no slope.")
        n = ascending.shape[1]
        largest = ascending[:, -1:] if n else ascending
        cut = _WEIGHTWATCHER_CUT if convention == "weightwatcher" else largest * (n * np.finfo(np.float64).eps)
        above = ascending > cut
        kept = np.count_nonzero(above, axis=1)
        logs = np.log(np.divide(ascending, largest, out=np.ones_like(ascending), where=above))
        counts = np.arange(n, 1, -1, dtype=np.int64)
        # Σ_{j ≥ i} ln(x_j / x_i) for all i at once, by one sum from the top.
        excess = np.cumsum(logs[:, ::-1], axis=1)[:, ::-1][:, : len(counts)] - counts * logs[:, : len(counts)]
        few = (kept < _WEIGHTWATCHER_FEW) & (convention == "weightwatcher")
        least = np.maximum(min_tail, np.where(few, np.minimum(_WEIGHTWATCHER_TAIL, kept), 2))
        valid = above[:, : len(counts)] & (excess > 0) & (counts >= least[:, None])
        with np.errstate(divide="ignore"):
            alpha = 1 + (counts - few[:, None]) / np.where(excess > 0, excess, 0.0)
        return cls(ascending, logs, alpha, valid, counts, kept, least)

    def why_none(self, row: int = 0) -> str | None:
        """Why a spectrum has no tail, or None."""
        if self.valid[row].any():
            return None
        spectrum = self.x[row]
        if not spectrum.size:
            return "there are no eigenvalues"
        if spectrum[-1] == 0:
            return "all eigenvalues are zero"
        if self.kept[row] < self.least[row]:
            return f"{self.kept[row]} of {spectrum.size} eigenvalues are above the cut, a tail needs {self.least[row]}"
        return "the eigenvalues of the tail are all equal, which no power law of finite α is"

    def distance(self, row: int, i: int) -> float:
        """D with the i-th eigenvalue of a row as xmin."""
        if not self.valid[row, i]:
            return math.inf
        n = int(self.counts[i])
        fitted = -np.expm1((1 - self.alpha[row, i]) * (self.logs[row, i:] - self.logs[row, i]))
        return float(np.abs(fitted - np.arange(n) / n).max())

    def best(self, row: int = 0) -> tuple[int, float]:
        """The candidate of least D, the first of equals: tails in the order of their bounds, while these are lower."""
        alive = np.flatnonzero(self.valid[row])
        best, least, bounds = -1, math.inf, np.zeros(0)
        for probes in _PROBES:
            bounds = self._bounds(np.full_like(alive, row), alive, probes)
            likely = int(alive[np.argmin(bounds)])
            best, least = min((best, least), (likely, self.distance(row, likely)), key=lambda found: found[1])
            kept = bounds <= least + _MARGIN
            alive, bounds = alive[kept], bounds[kept]
        for place in np.argsort(bounds, kind="stable"):
            if bounds[place] > least + _MARGIN:
                break
            i = int(alive[place])
            distance = self.distance(row, i)
            if distance < least or (distance == least and i < best):
                best, least = i, distance
        return best, least

    def reach_below(self, limit: float) -> Bool[np.ndarray, " rows"]:
        """Which spectra have a tail with D < ``limit``: cheaper than the least D of each, and all of them together."""
        found = np.zeros(len(self.x), dtype=bool)
        rows, candidates = np.nonzero(self.valid)
        bounds = np.zeros(0)
        for probes in _PROBES:
            bounds = self._bounds(rows, candidates, probes)
            open_ = bounds < limit + _MARGIN
            rows, candidates, bounds = rows[open_], candidates[open_], bounds[open_]
        for place in np.argsort(bounds, kind="stable"):
            row, i = int(rows[place]), int(candidates[place])
            found[row] = found[row] or self.distance(row, i) < limit
        return found

    def _bounds(
        self, rows: Int64[np.ndarray, " some"], candidates: Int64[np.ndarray, " some"], probes: int
    ) -> Float64[np.ndarray, " some"]:
        ranks = np.arange(1, probes + 1) / (probes + 1)
        bounds = np.empty(len(rows))
        for start in range(0, len(rows), _CHUNK):
            some = slice(start, start + _CHUNK)
            row, first = rows[some], candidates[some]
            counts = self.counts[first]
            offsets = (counts * ranks[:, None]).astype(np.int64)
            spans = self.logs[row, first + offsets] - self.logs[row, first]
            fitted = -np.expm1((1 - self.alpha[row, first]) * spans)
            bounds[some] = np.abs(fitted - offsets / counts).max(axis=0)
        return bounds
