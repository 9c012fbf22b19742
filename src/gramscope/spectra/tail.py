"""The continuous power-law fit to the tail of a spectrum, over all lower ends xmin."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int64

from gramscope.base.errors import InputError
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues, relative_cut

Convention = Literal["gramscope", "weightwatcher"]

_WEIGHTWATCHER_CUT = 1e-5
_WEIGHTWATCHER_FEW, _WEIGHTWATCHER_TAIL = 20, 8
# Points of a tail at which the distance is looked at, first in all tails, then in those that may still win.
_PROBES = (5, 24)
_MARGIN = 1e-12
_CHUNK = 4096


@dataclass(frozen=True)
class TailFit:
    """A power law ``p(λ) ∝ λ^{-α}`` for ``λ ≥ xmin``, and how well it sits.

    ``D`` is the Kolmogorov distance, ``n_tail`` the number of eigenvalues it rests on, ``sigma`` the standard error
    of α were they independent, ``n`` the number of eigenvalues above the cut. Where there is nothing to fit all
    of it is NaN, ``n_tail`` is 0 and ``reason`` says why.
    """

    alpha: float
    D: float
    xmin: float
    n_tail: int
    sigma: float
    lambda_max: float
    n: int
    convention: Convention = "gramscope"
    reason: str | None = None

    @property
    def alpha_hat(self) -> float:
        """``α log10 λ_max`` (theory 6)."""
        return self.alpha * math.log10(self.lambda_max) if self.lambda_max > 0 else math.nan


@dataclass(frozen=True)
class TailScan:
    """The fit at every candidate xmin, ascending: what :func:`fit_tail` chooses from, D being inf where undefined."""

    xmin: Float64[np.ndarray, " candidates"]
    alpha: Float64[np.ndarray, " candidates"]
    D: Float64[np.ndarray, " candidates"]
    n_tail: Int64[np.ndarray, " candidates"]


def fit_tail(eigenvalues: Eigenvalues, convention: Convention = "gramscope", *, min_tail: int = 2) -> TailFit:
    """Fit a power law to the tail of a spectrum, its lower end chosen where the fit is closest.

    Every eigenvalue but the greatest is a candidate xmin. With the n eigenvalues ``x ≥ xmin``: ``α = 1 + n / Σ
    ln(x/xmin)``, ``D = max |F_fit(x) − {0, ..., n−1}/n|``, ``F_fit = 1 − (x/xmin)^{1−α}``; the xmin of least D is
    taken, and ``σ = (α − 1)/√n``. A. Clauset, C. R. Shalizi & M. E. J. Newman, SIAM Rev. 51 (2009), (3.1), (3.2),
    (3.9); theory 6.

    ``convention="gramscope"`` drops eigenvalues below ``λ_max · n · ε``, so α does not depend on the scale of the
    weight. ``"weightwatcher"`` drops those below 1e-5, and for fewer than 20 eigenvalues takes ``α = 1 + (n−1)/Σ`` and
    tails of 8 and more: the numbers of WeightWatcher 0.7.7. ``min_tail`` is the least n that counts.

    ``eigenvalues``: (n,), in any order. A spectrum without a tail (all zero, all equal, too few) gives NaN and a
    warning.

    >>> x = (1 - np.arange(400) / 400) ** (-1 / 1.5)           # quantiles of a power law with α = 2.5
    >>> fit = fit_tail(x)
    >>> round(fit.alpha, 2), fit.n_tail, fit.D < 0.01
    (2.51, 400, True)
    """
    fit = fit_checked(as_eigenvalues(eigenvalues, "fit_tail"), require_convention(convention), min_tail)
    if fit.reason:
        warnings.warn(f"fit_tail: alpha is NaN: {fit.reason}", stacklevel=2)
    return fit


def scan_tail(eigenvalues: Eigenvalues, convention: Convention = "gramscope", *, min_tail: int = 2) -> TailScan:
    """α and D at every candidate xmin, for a look at how sharp the choice of xmin is.

    The equations are those of :func:`fit_tail`; ``D`` is computed in full, n²/2 terms.

    >>> scan = scan_tail([1.0, 2.0, 4.0, 8.0])
    >>> scan.xmin.tolist(), scan.n_tail.tolist()
    ([1.0, 2.0, 4.0], [4, 3, 2])
    """
    tail = _Candidates.of(as_eigenvalues(eigenvalues, "scan_tail"), require_convention(convention), min_tail)
    distances = np.array([tail.distance(i) for i in range(len(tail.alpha))])
    return TailScan(tail.x[:-1], tail.alpha, distances, tail.counts)


def fit_checked(ascending: Array, convention: Convention, min_tail: int = 2) -> TailFit:
    """:func:`fit_tail` for checked eigenvalues, without the warning."""
    largest = float(ascending[-1]) if ascending.size else math.nan
    tail = _Candidates.of(ascending, convention, min_tail)
    reason = tail.why_none(ascending)
    if reason:
        return TailFit(math.nan, math.nan, math.nan, 0, math.nan, largest, len(tail.x), convention, reason)
    best, distance = tail.best()
    alpha, n = float(tail.alpha[best]), int(tail.counts[best])
    # All eigenvalues at or above xmin: with ties more than the candidate's own count.
    n_tail = int(np.count_nonzero(ascending >= tail.x[best]))
    return TailFit(
        alpha, distance, float(tail.x[best]), n_tail, (alpha - 1) / math.sqrt(n), largest, len(tail.x), convention
    )


def require_convention(convention: Convention) -> Convention:
    if convention not in get_args(Convention):
        raise InputError(f"convention must be one of {get_args(Convention)}, got {convention!r}.")
    return convention


@dataclass(frozen=True)
class _Candidates:
    """All tails of one spectrum: eigenvalues above the cut, and α for each of them as xmin."""

    x: Float64[np.ndarray, " n"]
    logs: Float64[np.ndarray, " n"]  # ln(x / x_max), so that equal greatest eigenvalues differ by exactly nothing
    alpha: Float64[np.ndarray, " candidates"]
    counts: Int64[np.ndarray, " candidates"]
    valid: Bool[np.ndarray, " candidates"]
    min_tail: int

    @classmethod
    def of(cls, ascending: Array, convention: Convention, min_tail: int) -> "_Candidates":
        if min_tail < 2:
            raise InputError(f"min_tail must be at least 2, got {min_tail}. One eigenvalue has no slope.")
        cut = _WEIGHTWATCHER_CUT if convention == "weightwatcher" else relative_cut(ascending)
        x = ascending[np.searchsorted(ascending, cut, side="right") :]
        logs = np.log(x / x[-1]) if x.size else x
        counts = np.arange(len(x), 1, -1, dtype=np.int64)
        # Σ_{j ≥ i} ln(x_j / x_i) for all i at once, by one sum from the top.
        excess = np.cumsum(logs[::-1])[::-1][:-1] - counts * logs[:-1]
        few = convention == "weightwatcher" and len(x) < _WEIGHTWATCHER_FEW
        least = max(min_tail, min(_WEIGHTWATCHER_TAIL, len(x)) if few else 2)
        valid = (excess > 0) & (counts >= least)
        with np.errstate(divide="ignore"):
            alpha = 1 + (counts - few) / np.where(excess > 0, excess, 0.0)
        return cls(x, logs, alpha, counts, valid, least)

    def why_none(self, ascending: Array) -> str | None:
        """Why no candidate is left, or None."""
        if self.valid.any():
            return None
        if not ascending.size:
            return "there are no eigenvalues"
        if ascending[-1] == 0:
            return "all eigenvalues are zero"
        if len(self.x) < self.min_tail:
            return f"{len(self.x)} of {ascending.size} eigenvalues are above the cut, a tail needs {self.min_tail}"
        return "the eigenvalues of the tail are all equal, which no power law of finite α is"

    def distance(self, i: int) -> float:
        """D with the i-th eigenvalue as xmin."""
        if not self.valid[i]:
            return math.inf
        n = int(self.counts[i])
        fitted = -np.expm1((1 - self.alpha[i]) * (self.logs[i:] - self.logs[i]))
        return float(np.abs(fitted - np.arange(n) / n).max())

    def best(self) -> tuple[int, float]:
        """The candidate of least D, the first of equals.

        D at a few points of each tail bounds it from below. Tails are computed in full in the order of these bounds,
        until the next bound exceeds the least D found: the same answer as the n²/2 terms of all tails.
        """
        alive, bounds = np.flatnonzero(self.valid), np.zeros(0)
        best, least = -1, math.inf
        for probes in _PROBES:
            bounds = self._bounds(alive, probes)
            likely = int(alive[np.argmin(bounds)])
            best, least = min((best, least), (likely, self.distance(likely)), key=lambda found: found[1])
            # A bound and its D agree only to rounding, hence the margin.
            kept = bounds <= least + _MARGIN
            alive, bounds = alive[kept], bounds[kept]
        for place in np.argsort(bounds, kind="stable"):
            if bounds[place] > least + _MARGIN:
                break
            i = int(alive[place])
            distance = self.distance(i)
            if distance < least or (distance == least and i < best):
                best, least = i, distance
        return best, least

    def _bounds(self, candidates: Int64[np.ndarray, " some"], probes: int) -> Float64[np.ndarray, " some"]:
        ranks = np.arange(1, probes + 1) / (probes + 1)
        bounds = []
        for some in np.split(candidates, range(_CHUNK, len(candidates), _CHUNK)):
            counts = self.counts[some][:, None]
            offsets = (counts * ranks).astype(np.int64)
            spans = self.logs[some[:, None] + offsets] - self.logs[some][:, None]
            fitted = -np.expm1((1 - self.alpha[some])[:, None] * spans)
            bounds.append(np.abs(fitted - offsets / counts).max(axis=1))
        return np.concatenate(bounds)
