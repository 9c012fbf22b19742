"""How often a true power law would sit as badly: the bootstrap p-value of a tail fit."""

import math

import numpy as np
from jaxtyping import Float64

from gramscope.base.errors import InputError
from gramscope.base.rng import child_seed
from gramscope.base.user_warnings import warn
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues
from gramscope.spectra.tail import TailFit, fit_checked, require_convention
from gramscope.spectra.tails import Convention, Tails

_LARGEST_LOG = 700.0
# Values of replicates that are drawn and fitted together.
_TOGETHER = 1 << 17


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
    if replicates < 1:
        raise InputError(f"replicates must be at least 1, got {replicates}. 100 tell p to about 0.05.")
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
