"""How often a true power law would sit as badly: the bootstrap p-value of a tail fit."""

import math
import warnings

import numpy as np

from gramscope.base.errors import InputError
from gramscope.base.rng import child_seed
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues
from gramscope.spectra.tail import Convention, TailFit, fit_checked, require_convention

_LARGEST_LOG = 700.0


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
    else one of the eigenvalues below xmin; it is fitted anew, xmin included, and ``p = (1 + #{D* ≥ D}) / (1 +
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
        warnings.warn(f"p_value: p is NaN: {fit.reason}", stacklevel=2)
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
    worse = sum(
        fit_checked(_replicate(below, fit, rng), fit.convention, min_tail).D >= fit.D for _ in range(replicates)
    )
    return (1 + worse) / (1 + replicates)


def _replicate(below: Array, fit: TailFit, rng: np.random.Generator) -> Array:
    in_tail = int(rng.binomial(fit.n, fit.n_tail / fit.n)) if below.size else fit.n
    logs = -np.log1p(-rng.random(in_tail)) / (fit.alpha - 1)
    # An α next to 1 draws values beyond float64; the greatest that fits will do, for D looks at ranks.
    tail = fit.xmin * np.exp(np.minimum(logs, _LARGEST_LOG - math.log(fit.xmin)))
    return np.sort(np.concatenate([tail, rng.choice(below, fit.n - in_tail)] if below.size else [tail]))
