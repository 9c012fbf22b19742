"""The continuous power-law fit to the tail of a spectrum, over all lower ends xmin."""

import math
from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np
from jaxtyping import Float64, Int64

from gramscope.base.charts import line_chart
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result, TableResult
from gramscope.base.user_warnings import warn
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues
from gramscope.spectra.tails import Convention, Tails


@dataclass(frozen=True, repr=False)
class TailFit(Result):
    """A power law ``p(λ) ∝ λ^{-α}`` for ``λ ≥ xmin``, and how well it fits.

    ``D`` is the Kolmogorov distance, ``n_tail`` the number of eigenvalues it rests on, ``sigma`` the standard error
    of α were they independent, ``n`` the number of eigenvalues above the cut. Where there is nothing to fit all
    of it is NaN, ``n_tail`` is 0 and ``reason`` says why.
    """

    shown: ClassVar[tuple[str, ...]] = ("alpha", "sigma", "n_tail", "xmin", "D", "reason")

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
class TailScan(TableResult):
    """The fit at every candidate xmin, ascending: what :func:`fit_tail` chooses from, D being inf where undefined."""

    columns: ClassVar[tuple[str, ...]] = ("xmin", "alpha", "D", "n_tail")

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


def require_convention(convention: Convention) -> Convention:
    if convention not in get_args(Convention):
        raise InputError(f"convention must be one of {get_args(Convention)}, got {convention!r}.")
    return convention
