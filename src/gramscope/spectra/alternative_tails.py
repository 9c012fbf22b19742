"""Alternatives of the power law on the same tail: exponential and truncated power law, by likelihood ratio."""

import math
from dataclasses import dataclass

import numpy as np

from gramscope.base.results import Result
from gramscope.base.user_warnings import warn
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues
from gramscope.spectra.tail import TailFit

# exp(-45) is below the last bit of the integral's peak.
_DEPTH = 45.0
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(160)
_MIN_TAIL = 3
_NARROW = 1e-9


@dataclass(frozen=True, repr=False)
class Alternative(Result, shown=("name", "ratio", "p", "parameters", "reason")):
    """Another law fitted to the same tail, and how the power law fares against it.

    ``ratio`` is the log-likelihood of the power law minus that of the other: above zero speaks for the power law. ``p``
    is the probability of a ratio this far from zero (for the nested truncated power law: this far below) if both were
    equally good; above about 0.1 the data cannot tell. ``parameters`` of the exponential: ``rate``; of the truncated
    power law: ``alpha`` and ``rate`` of ``λ^{-α} e^{-rate·λ}``, both at least zero: a power law at one end, an
    exponential at the other. NaN where the tail is too short, with ``reason``.
    """

    name: str
    parameters: dict[str, float]
    log_likelihood: float
    ratio: float
    p: float
    reason: str | None = None


def alternatives(eigenvalues: Eigenvalues, fit: TailFit) -> dict[str, Alternative]:
    """Fit an exponential and a truncated power law to the tail of ``fit`` and compare their likelihoods.

    ``R = Σ ln p_PL(x) − ln p_other(x)`` over ``x ≥ xmin``. Exponential ``rate·e^{−rate(x−xmin)}``: p of Vuong's test,
    ``erfc(|R| / √(2 n s²))`` with s² the variance of the terms. Truncated power law ``x^{−α} e^{−rate·x}``, α, rate ≥
    0: it contains the power law on its boundary, so ``2|R|`` is half a point mass at zero and half χ²₁. Clauset,
    Shalizi & Newman, SIAM Rev. 51 (2009), table 2.1 and appendix C; S. G. Self & K.-Y. Liang, JASA 82 (1987).

    >>> from gramscope.spectra import fit_tail
    >>> x = 1 - np.log(1 - (np.arange(400) + 0.5) / 400)       # quantiles of an exponential law
    >>> found = alternatives(x, fit_tail(x, min_tail=200))["exponential"]
    >>> found.ratio < 0, found.p < 0.01
    (True, True)
    """
    found = alternatives_checked(as_eigenvalues(eigenvalues, "alternatives"), fit)
    reason = found["exponential"].reason
    if reason:
        warn(f"alternatives: the ratios are NaN: {reason}")
    return found


def alternatives_checked(ascending: Array, fit: TailFit) -> dict[str, Alternative]:
    """:func:`alternatives` for checked eigenvalues, without the warning."""
    tail = ascending[ascending >= fit.xmin] if fit.reason is None else ascending[:0]
    reason = _why_none(tail, fit)
    if reason:
        named = {"exponential": ("rate",), "truncated": ("alpha", "rate")}
        nan = (math.nan,) * 3
        return {name: Alternative(name, dict.fromkeys(of, math.nan), *nan, reason) for name, of in named.items()}
    t = tail / fit.xmin
    logs = np.log(t)
    alpha = 1 + 1 / float(logs.mean())  # the power law of greatest likelihood
    power = math.log(alpha - 1) - alpha * logs
    return {
        "exponential": _exponential(t, power, fit.xmin),
        "truncated": _truncated(t, logs, power, fit.xmin),
    }


def _why_none(tail: Array, fit: TailFit) -> str | None:
    if fit.reason:
        return fit.reason
    if len(tail) < _MIN_TAIL:
        return f"the tail has {len(tail)} eigenvalues, a comparison needs {_MIN_TAIL}"
    if tail.mean() / fit.xmin - 1 < _NARROW:
        return "the eigenvalues of the tail differ by no more than rounding"
    return None


def _exponential(t: Array, power: Array, xmin: float) -> Alternative:
    rate = 1 / (float(t.mean()) - 1)
    density = math.log(rate) - rate * (t - 1)
    terms = power - density
    ratio, spread = float(terms.sum()), float(terms.std())
    # Equal laws up to rounding cannot be told apart; 0/0 would call it NaN.
    p = math.erfc(abs(ratio) / (math.sqrt(2 * len(t)) * spread)) if spread > 0 else 1.0
    likelihood = float(density.sum()) - len(t) * math.log(xmin)
    return Alternative("exponential", {"rate": rate / xmin}, likelihood, ratio, p)


def _truncated(t: Array, logs: Array, power: Array, xmin: float) -> Alternative:
    alpha, kappa = _fit_truncated(float(logs.mean()), float(t.mean()))
    if kappa == 0.0:
        density = power
    else:
        density = -alpha * logs - kappa * t - _log_normaliser(alpha, kappa)[0]
    # The power law lies on the boundary of this family, so a ratio above zero is rounding.
    ratio = min(float((power - density).sum()), 0.0)
    p = 0.5 * math.erfc(math.sqrt(-ratio)) if ratio < 0 else 1.0  # P(χ²₁ > 2|R|) = erfc √|R|
    likelihood = float(density.sum()) - len(t) * math.log(xmin)
    return Alternative("truncated", {"alpha": alpha, "rate": kappa / xmin}, likelihood, ratio, p)


def _fit_truncated(mean_log: float, mean: float) -> tuple[float, float]:
    """Maximum likelihood of ``t^{-a} e^{-κt}``, a ≥ 0 and κ ≥ 0, on t ≥ 1, from the means of ln t and t.

    An exponential family in (ln t, t): its log-likelihood is concave in (a, κ). So the power law (κ = 0) is the
    answer exactly if the slope in κ is not positive there, that is if its mean does not exceed the mean of the data;
    and the exponential (a = 0) is, if the slope in a is not positive there. Else both are above zero.
    """
    from scipy.optimize import minimize  # slow to import, and needed here alone

    a = 1 + 1 / mean_log
    if a > 2 and (a - 1) / (a - 2) <= mean:
        return a, 0.0
    start = np.array([0.0, -math.log(mean - 1)])
    if _objective(start, mean_log, mean)[1][0] >= 0:
        return 0.0, math.exp(start[1])
    found = minimize(
        _objective, start, (mean_log, mean), "L-BFGS-B", jac=True, bounds=[(0.0, None), (None, None)],
        options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 1000},
    ).x  # fmt: skip
    return float(found[0]), math.exp(found[1])


def _objective(point: np.ndarray, mean_log: float, mean: float) -> tuple[float, np.ndarray]:
    """Minus the mean log-likelihood at (a, ln κ), and its gradient."""
    a, kappa = float(point[0]), math.exp(point[1])
    log_norm, expected = _log_normaliser(a, kappa)
    value = a * mean_log + kappa * mean + log_norm
    return value, np.array([mean_log - expected[0], kappa * (mean - expected[1])])


def _log_normaliser(a: float, kappa: float) -> tuple[float, np.ndarray]:
    """``ln ∫_1^∞ t^{-a} e^{-κt} dt`` and the mean of (ln t, t) under that law.

    With ``t = e^u`` the integrand is ``exp((1−a)u − κ e^u)``, log-concave in u ≥ 0, so Gauss-Legendre nodes
    between the two places where it has fallen by ``e^{-45}`` integrate it to rounding.
    """
    mode = math.log((1 - a) / kappa) if 1 - a > kappa else 0.0
    low, high = _extent(a, kappa, mode)
    u = (high + low) / 2 + (high - low) / 2 * _NODES
    exponent = (1 - a) * u - kappa * np.exp(u)
    peak = float(exponent.max())
    weights = _NODE_WEIGHTS * np.exp(exponent - peak)
    total = float(weights.sum())
    return peak + math.log(total * (high - low) / 2), np.stack([u, np.exp(u)]) @ weights / total


def _extent(a: float, kappa: float, mode: float) -> tuple[float, float]:
    """Where the log-integrand has fallen by ``_DEPTH`` below its value at the mode, on either side."""
    from scipy.optimize import brentq

    def height(u: float) -> float:
        # exp(u) far to the right would overflow, and has fallen there.
        return (1 - a) * (u - mode) - kappa * math.exp(mode) * math.expm1(min(u - mode, 700.0)) + _DEPTH

    reach = 1e-12
    while height(mode + reach) > 0:
        reach *= 2
    high = brentq(height, mode, mode + reach, rtol=1e-6)
    return (0.0 if mode == 0.0 or height(0.0) > 0 else brentq(height, 0.0, mode, rtol=1e-6)), high
