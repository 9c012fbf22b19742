"""The Marchenko-Pastur law: what the spectrum of a weight would be if its entries were noise, and what sticks out."""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.user_warnings import warn
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues, relative_cut
from gramscope.spectra.tail import Convention, require_convention

# 99 % quantile of the Tracy-Widom law of real matrices (F. Bornemann, Markov Process. Related Fields 16 (2010)).
_TRACY_WIDOM_99 = 2.0234
_MIN_EIGENVALUES = 8
_GRID = 4096


@dataclass(frozen=True, repr=False)
class MarchenkoPasturFit(Result, shown=("spikes", "edges", "sigma", "soft_rank", "D", "reason")):
    """Noise that explains the bulk of a spectrum, and the spikes that it does not.

    ``sigma``: standard deviation of the noise's entries. ``edges``: of the bulk, in units of λ. ``threshold``: the
    upper edge plus its Tracy-Widom width. ``spikes``: eigenvalues above that. ``soft_rank``: upper edge over λ_max.
    ``D``: Kolmogorov distance of the bulk to the law, small if it is noise.
    """

    sigma: float
    edges: tuple[float, float]
    threshold: float
    spikes: int
    soft_rank: float
    D: float
    reason: str | None = None


def fit_marchenko_pastur(
    eigenvalues: Eigenvalues, shape: tuple[int, int], convention: Convention = "gramscope"
) -> MarchenkoPasturFit:
    """Fit the Marchenko-Pastur law of an N × M matrix with independent entries to the bulk of a spectrum of WᵀW.

    The bulk of ``λ/N`` lies in ``σ²(1 ± Q^{-1/2})²``, ``Q = N/M ≥ 1``. σ matches the quantiles of the eigenvalues that
    are not spikes to those of the law, from the median on, until the set of spikes no longer changes. A spike is above
    the 99 % point of the greatest eigenvalue of noise, ``σ²(μ + 2.02 s)``, ``μ = (√(N−1)+√M)²``, ``s = √μ (1/√(N−1) +
    1/√M)^{1/3}``. Where half of the eigenvalues or more are zero, as the rank counts zero (``λ ≤ λ_max · N · ε``),
    there is no bulk and no fit. V. A. Marčenko & L. A. Pastur, Math. USSR Sb. 1 (1967); I. M. Johnstone, Ann. Statist.
    29 (2001), (1.2)-(1.4).

    ``convention="weightwatcher"``: λ scaled to mean one, σ by least squares against a kernel density (σ is of the
    scaled λ), a spike above ``λ₊ + √(Q^{-1/2} (λ₊/M)^{2/3})``; like WeightWatcher it also fits eigenvalues that are
    rounding.

    ``eigenvalues``: (n,) of one matrix of this shape, or pooled of several.

    >>> rng = np.random.default_rng(0)
    >>> W = 0.1 * rng.standard_normal((400, 200)); W[0] += 0.5
    >>> found = fit_marchenko_pastur(np.linalg.svd(W, compute_uv=False) ** 2, W.shape)
    >>> found.spikes, round(found.sigma, 2)
    (1, 0.1)
    """
    ascending = as_eigenvalues(eigenvalues, "fit_marchenko_pastur")
    found = fit_marchenko_pastur_checked(ascending, shape, require_convention(convention))
    if found.reason:
        warn(f"fit_marchenko_pastur: sigma, edges and soft_rank are NaN: {found.reason}")
    return found


def marchenko_pastur_density(x: Eigenvalues, shape: tuple[int, int], sigma: float = 1.0) -> Array:
    """The density of the eigenvalues of WᵀW for an N × M matrix of independent entries of variance σ².

    ``ρ(λ) = √((λ₊ − λ)(λ − λ₋)) / (2π σ² M λ)`` with ``λ± = σ²(√N ± √M)²``, N ≥ M. Marčenko & Pastur (1967), (1.14).

    >>> x = np.linspace(1e-9, 900, 200_001)
    >>> round(float(np.trapezoid(marchenko_pastur_density(x, (400, 100)), x)), 4)
    1.0
    """
    long, short = _sides(shape)
    check_number(sigma, "sigma", above=0.0, hint="It is the standard deviation of the entries.")
    points = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64)
    low, high = _edges(sigma**2, long, short)
    inside = (points > low) & (points < high) & (points > 0)
    at = np.where(inside, points, 1.0)
    root = np.sqrt(np.where(inside, (high - points) * (points - low), 0.0))
    return root / (2 * math.pi * sigma**2 * short * at)


def fit_marchenko_pastur_checked(
    ascending: Array, shape: tuple[int, int], convention: Convention
) -> MarchenkoPasturFit:
    """:func:`fit_marchenko_pastur` for checked eigenvalues, without the warning."""
    long, short = _sides(shape)
    # WeightWatcher fits whatever is above zero; by our convention what is rounding of λ_max is zero, as for the rank.
    zero = 0.0 if convention == "weightwatcher" else relative_cut(ascending, long)
    reason = _why_undefined(ascending, short, zero)
    if reason:
        return undefined(reason)
    if convention == "weightwatcher":
        return _fit_weightwatcher(ascending, long, short)
    law = quantiles(short / long, len(ascending)) * long
    mu = (math.sqrt(long - 1) + math.sqrt(short)) ** 2
    width = math.sqrt(mu) * (1 / math.sqrt(long - 1) + 1 / math.sqrt(short)) ** (1 / 3)
    variance = float(np.median(ascending) / np.median(law))
    bulk, seen = len(ascending), set[int]()
    # The number of spikes moves by a few at a time; should it ever circle, the first repeat ends it.
    while bulk not in seen:
        seen.add(bulk)
        variance = _match(ascending[:bulk], law if bulk == len(law) else quantiles(short / long, bulk) * long, variance)
        bulk = int(np.searchsorted(ascending, variance * (mu + _TRACY_WIDOM_99 * width), side="right"))
        bulk = max(bulk, len(ascending) // 2)
    if variance * long <= zero:
        return undefined("nearly half of the eigenvalues are zero, so there is no bulk")
    return _result(ascending, variance, long, short, variance * (mu + _TRACY_WIDOM_99 * width))


def undefined(reason: str) -> MarchenkoPasturFit:
    """No fit, and why."""
    nan = math.nan
    return MarchenkoPasturFit(nan, (nan, nan), nan, 0, nan, nan, reason)


@lru_cache(maxsize=64)
def quantiles(y: float, count: int) -> Array:
    """Quantiles (i + ½)/count of the law of λ/N for σ = 1 and ``y = M/N ≤ 1``.

    With ``x = 1 + y − 2√y cos θ`` its density is ``2 sin²θ / (π x)`` in θ, smooth on [0, π].
    """
    x, cumulative = _law(y)
    return np.interp((np.arange(count) + 0.5) / count, cumulative, x)


@lru_cache(maxsize=64)
def _law(y: float) -> tuple[Array, Array]:
    theta = np.linspace(0.0, math.pi, _GRID + 1)
    x = 1 + y - 2 * math.sqrt(y) * np.cos(theta)
    # At y = 1 and θ = 0 the density is 0/0 with the limit 2 (1 + cos θ)/2 / π.
    density = (1 + np.cos(theta)) / math.pi if y == 1 else 2 * np.sin(theta) ** 2 / (math.pi * x)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return x, cumulative / cumulative[-1]


def _match(bulk: Array, law: Array, variance: float) -> float:
    """σ² for which the middle 80 % of the bulk fits the law's quantiles best, by least squares."""
    low, high = len(bulk) // 10, len(bulk) - len(bulk) // 10
    middle, target = bulk[low:high], law[low:high]
    return float((middle @ target) / (target @ target)) if middle.size else variance


def _result(ascending: Array, variance: float, long: int, short: int, threshold: float) -> MarchenkoPasturFit:
    edges = _edges(variance, long, short)
    bulk = ascending[ascending <= threshold]
    return MarchenkoPasturFit(
        sigma=math.sqrt(variance),
        edges=edges,
        threshold=threshold,
        spikes=len(ascending) - len(bulk),
        soft_rank=edges[1] / float(ascending[-1]),
        D=_distance(bulk / (variance * long), short / long),
    )


def _edges(variance: float, long: int, short: int) -> tuple[float, float]:
    low, high = (variance * (math.sqrt(long) + sign * math.sqrt(short)) ** 2 for sign in (-1, 1))
    return low, high


def _distance(bulk: Array, y: float) -> float:
    """Kolmogorov distance of λ/(σ²N) to the law; as far as can be, 1, where all is spikes."""
    if not bulk.size:
        return 1.0
    fitted = np.interp(bulk, *_law(y))
    steps = np.arange(len(bulk) + 1) / len(bulk)
    return float(max(np.abs(fitted - steps[1:]).max(), np.abs(fitted - steps[:-1]).max()))


def _sides(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 1:
        raise InputError(
            f"shape must be (rows, cols) of a matrix, got {tuple(shape)}. For a stack pass that of one matrix."
        )
    return max(shape), min(shape)


def _why_undefined(ascending: Array, short: int, zero: float) -> str | None:
    if short < 2:
        return "a matrix with one row or column has a single eigenvalue, of which no law speaks"
    if ascending.size < _MIN_EIGENVALUES:
        return f"{ascending.size} eigenvalues, a bulk needs {_MIN_EIGENVALUES}"
    if 2 * np.count_nonzero(ascending <= zero) >= ascending.size:
        return "half of the eigenvalues or more are zero, so there is no bulk"
    return None


def _fit_weightwatcher(ascending: Array, long: int, short: int) -> MarchenkoPasturFit:
    from scipy.optimize import brute, fmin  # slow to import, and needed here alone

    scale = len(ascending) / float(ascending.sum())
    scaled = ascending * scale
    root = math.sqrt(short / long)
    guess = math.sqrt(float(scaled[-1])) / (1 + root)
    values = np.sqrt(scaled) if long == short else scaled
    x = np.linspace(0, values.max() + 0.5, 1000)
    density = _triangular_density(values, x, 0.1)
    seen = x[density > 0.01], density[density > 0.01], short / long
    # A grid, then a simplex search from its best point.
    grid = (slice(0.05 * guess, 2.0 * guess, 0.01 * guess),)
    sigma = float(np.ravel(brute(_misfit, grid, args=seen, finish=partial(fmin, disp=False)))[0])
    upper = (sigma * (1 + root)) ** 2
    threshold = upper + math.sqrt(root * upper ** (2 / 3) * short ** (-2 / 3))
    plain = _result(ascending, sigma**2 / scale / long, long, short, threshold / scale)
    return MarchenkoPasturFit(
        sigma=sigma,
        edges=((sigma * (1 - root)) ** 2 / scale, upper / scale),
        threshold=threshold / scale,
        spikes=int(np.count_nonzero(scaled > threshold)),
        soft_rank=upper / float(scaled[-1]),
        D=plain.D,
    )


def _misfit(sigma: Float64[np.ndarray, " 1"], x: Array, density: Array, aspect: float) -> float:
    """WeightWatcher's misfit of σ: squared difference of the law to a density at the points x; ``aspect`` is M/N."""
    variance = float(sigma[0]) ** 2
    if aspect == 1:  # singular values and the quarter circle
        law = np.sqrt(np.maximum(4 - x**2, 0.0)) / (math.pi * variance)
        return float(((law - density) ** 2).sum())
    high, low = (variance * (1 + sign * math.sqrt(aspect)) ** 2 for sign in (1, -1))
    peak = x[np.argmax(density)]
    if high < peak or high > x.max() or low > peak:
        return 1e6 * len(x)
    root = np.sqrt(np.maximum((high - x) * (x - low), 0.0))
    law = np.divide(root, 2 * math.pi * variance * aspect * x, out=np.zeros_like(root), where=x > 0)
    return float(((law - density) ** 2).sum())


def _triangular_density(values: Array, x: Array, width: float) -> Array:
    """``Σ max(0, 1 − |x − λ|/h) / (n h)`` for ascending λ, by differences of one running sum."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start, middle, stop = (np.searchsorted(values, x + shift) for shift in (-width, 0.0, width))
    left = x * (middle - start) - (sums[middle] - sums[start])
    right = (sums[stop] - sums[middle]) - x * (stop - middle)
    return ((stop - start) - (left + right) / width) / (len(values) * width)
