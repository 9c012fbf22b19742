"""The continuous power-law fit to the tail of a spectrum, over all lower ends xmin, and its bootstrap p-value."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int64

from gramscope.base.charts import line_chart
from gramscope.base.checks import check_choice, check_count
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result, TableResult
from gramscope.base.rng import child_seed
from gramscope.base.user_warnings import warn
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues

Convention = Literal["gramscope", "weightwatcher"]

_WEIGHTWATCHER_CUT = 1e-5
_WEIGHTWATCHER_FEW, _WEIGHTWATCHER_TAIL = 20, 8
# Points of a tail at which the distance is looked at, first in all tails, then in those that may still win.
_PROBES = (5, 24)
_MARGIN = 1e-12  # a bound and its D agree only to rounding
_CHUNK = 4096
_LARGEST_LOG = 700.0
# Values of replicates that are drawn and fitted together.
_TOGETHER = 1 << 17


@dataclass(frozen=True, repr=False)
class TailFit(Result, shown=("alpha", "sigma", "n_tail", "xmin", "D", "reason")):
    """A power law ``p(λ) ∝ λ^{-α}`` for ``λ ≥ xmin``, and how well it fits.

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
        """``α log10 λ_max`` (Martin, Peng & Mahoney, Nature Communications 12, 2021)."""
        return self.alpha * math.log10(self.lambda_max) if self.lambda_max > 0 else math.nan


@dataclass(frozen=True, repr=False)
class TailScan(TableResult, columns=("xmin", "alpha", "D", "n_tail")):
    """The fit at every candidate xmin, ascending: what :func:`fit_tail` chooses from, D being inf where undefined."""

    xmin: Float64[np.ndarray, " candidates"]
    alpha: Float64[np.ndarray, " candidates"]
    D: Float64[np.ndarray, " candidates"]
    n_tail: Int64[np.ndarray, " candidates"]

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """D over xmin: how sharp the choice of the lower end is; a figure."""
        kept = np.isfinite(self.D)
        return line_chart(
            self.xmin[kept], {"D": self.D[kept]}, "Distance to a power law", "xmin", axes=axes, xscale="log"
        )


def fit_tail(eigenvalues: Eigenvalues, convention: Convention = "gramscope", *, min_tail: int = 2) -> TailFit:
    """Fit a power law to the tail of a spectrum, its lower end chosen where the fit is closest.

    Every eigenvalue but the greatest is a candidate xmin. With the n eigenvalues ``x ≥ xmin``: ``α = 1 + n / Σ
    ln(x/xmin)``, ``D = max |F_fit(x) − {0, ..., n−1}/n|``, ``F_fit = 1 − (x/xmin)^{1−α}``; the xmin of least D is
    taken, and ``σ = (α − 1)/√n``. A. Clauset, C. R. Shalizi & M. E. J. Newman, SIAM Rev. 51 (2009), (3.1), (3.2),
    (3.9).

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
        warn(f"fit_tail: alpha is NaN: {fit.reason}")
    return fit


def scan_tail(eigenvalues: Eigenvalues, convention: Convention = "gramscope", *, min_tail: int = 2) -> TailScan:
    """α and D at every candidate xmin, for a look at how sharp the choice of xmin is.

    The equations are those of :func:`fit_tail`; ``D`` is computed in full, n²/2 terms.

    >>> scan = scan_tail([1.0, 2.0, 4.0, 8.0])
    >>> scan.xmin.tolist(), scan.n_tail.tolist()
    ([1.0, 2.0, 4.0], [4, 3, 2])
    """
    tails = Tails.of(as_eigenvalues(eigenvalues, "scan_tail")[None], require_convention(convention), min_tail)
    some = slice(len(tails.x[0]) - int(tails.kept[0]), -1)
    distances = np.array([tails.distance(0, i) for i in range(*some.indices(len(tails.x[0])))])
    return TailScan(tails.x[0, some], tails.alpha[0, some.start :], distances, tails.counts[some.start :])


def fit_checked(ascending: Array, convention: Convention, min_tail: int = 2) -> TailFit:
    """:func:`fit_tail` for checked eigenvalues, without the warning."""
    largest = float(ascending[-1]) if ascending.size else math.nan
    tails = Tails.of(ascending[None], convention, min_tail)
    kept = int(tails.kept[0])
    reason = tails.why_none()
    if reason:
        return TailFit(math.nan, math.nan, math.nan, 0, math.nan, largest, kept, convention, reason)
    best, distance = tails.best()
    alpha, n = float(tails.alpha[0, best]), int(tails.counts[best])
    # All eigenvalues at or above xmin: with ties more than the candidate's own count.
    xmin = float(ascending[best])
    n_tail = int(np.count_nonzero(ascending >= xmin))
    return TailFit(alpha, distance, xmin, n_tail, (alpha - 1) / math.sqrt(n), largest, kept, convention)


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
        check_count(min_tail, "min_tail", 2)  # one eigenvalue has no slope
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


def require_convention(convention: Convention) -> Convention:
    check_choice(convention, "convention", get_args(Convention))
    return convention


def p_value(
    eigenvalues: Eigenvalues,
    convention: Convention = "gramscope",
    *,
    replicates: int = 100,
    seed: int = 0,
    min_tail: int = 2,
) -> float:
    """The probability that a true power law would be fitted as badly as this spectrum, or worse.

    Each replicate draws n values: with probability ``n_tail/n`` from the fitted law, ``x = xmin (1−u)^{−1/(α−1)}``,
    else one of the eigenvalues below xmin; it is fitted again, xmin included, and ``p = (1 + #{D* ≥ D}) / (1 +
    replicates)``. Below 0.1 the power law is ruled out. Clauset, Shalizi & Newman, SIAM Rev. 51 (2009), section 4.1.

    The draws are independent, eigenvalues repel each other and lie more evenly: D of a spectrum is smaller than
    that of independent draws, so p errs on the side of the power law. A small p stands; a large one proves little.

    ``eigenvalues``: (n,). One seed gives one number; no global random stream is touched.

    >>> x = (1 - (np.arange(300) + 0.5) / 300) ** (-1 / 1.5)
    >>> p_value(x, replicates=50) > 0.5
    True
    >>> p_value(np.linspace(1, 2, 300), replicates=50) < 0.1
    True
    """
    ascending = as_eigenvalues(eigenvalues, "p_value")
    fit = fit_checked(ascending, require_convention(convention), min_tail)
    if fit.reason:
        warn(f"p_value: p is NaN: {fit.reason}")
    return p_value_checked(ascending, fit, replicates, seed, min_tail)


def p_value_checked(ascending: Array, fit: TailFit, replicates: int, seed: int, min_tail: int = 2) -> float:
    """:func:`p_value` for checked eigenvalues and their fit; NaN where the fit is."""
    check_count(replicates, "replicates")
    if fit.reason:
        return math.nan
    rng = np.random.default_rng(child_seed(seed, "bootstrap"))
    above_cut = ascending[-fit.n :]
    below = above_cut[above_cut < fit.xmin]
    worse = 0
    for start in range(0, replicates, step := max(1, _TOGETHER // fit.n)):
        drawn = _replicates(below, fit, min(step, replicates - start), rng)
        tails = Tails.of(drawn, fit.convention, min_tail)
        # A draw without any tail (possible where few values are drawn) says nothing against the fit.
        worse += int(np.count_nonzero(tails.valid.any(axis=1) & ~tails.reach_below(fit.D)))
    return (1 + worse) / (1 + replicates)


def _replicates(below: Array, fit: TailFit, count: int, rng: np.random.Generator) -> Float64[np.ndarray, "count n"]:
    """Spectra of the fitted law above xmin, and of the eigenvalues themselves below, ascending."""
    share = fit.n_tail / fit.n if below.size else 1.0
    in_tail = np.arange(fit.n) < rng.binomial(fit.n, share, size=(count, 1))
    uniform = rng.random((count, fit.n))
    logs = -np.log1p(-uniform) / (fit.alpha - 1)
    # An α next to 1 draws values beyond float64; the greatest that fits will do, for D looks at ranks.
    tail = fit.xmin * np.exp(np.minimum(logs, _LARGEST_LOG - math.log(fit.xmin)))
    if below.size:
        np.copyto(tail, below[(uniform * below.size).astype(np.int64)], where=~in_tail)
    return np.sort(tail, axis=1)
