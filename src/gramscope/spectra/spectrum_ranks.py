"""Numbers of a whole spectrum: ranks, entropy, norms."""

import math
from dataclasses import dataclass

import numpy as np

from gramscope.base.results import Result
from gramscope.base.user_warnings import undefined, warn
from gramscope.spectra.eigenvalues import Array, Eigenvalues, as_eigenvalues, relative_cut
from gramscope.spectra.tail import Convention, require_convention

_WEIGHTWATCHER_EPSILON = 1e-10


@dataclass(frozen=True, repr=False)
class Ranks(Result):
    """Size and spread of a spectrum; NaN where undefined, with the reason."""

    lambda_max: float
    log_norm: float
    log_spectral_norm: float
    stable_rank: float
    participation: float
    entropy: float
    rank: int
    reasons: dict[str, str]


def ranks(eigenvalues: Eigenvalues, convention: Convention = "gramscope", *, size: int | None = None) -> Ranks:
    """Ranks, entropy and norms of a spectrum.

    ``log_norm = log10 Σλ`` (twice the log of the Frobenius norm), ``log_spectral_norm = log10 λ_max``, ``stable_rank =
    Σλ/λ_max``, ``participation = (Σλ)²/Σλ²``, ``rank = #{λ > λ_max · size · ε}``, ``entropy = −Σ p ln p / ln rank``
    with ``p = λ/Σλ`` (1 if flat, undefined for rank 1). Martin & Mahoney, JMLR 22 (2021), table 2. ``size``
    is the greater side of the matrix, by default the number of eigenvalues.

    ``convention="weightwatcher"``: the rank counts ``√λ > √λ_max · size · ε``, and the entropy adds 1e-10 to p and
    rank.

    >>> found = ranks([0.0, 1.0, 1.0, 2.0])
    >>> found.stable_rank, found.rank, round(found.entropy, 3)
    (2.0, 3, 0.946)
    """
    found = ranks_checked(as_eigenvalues(eigenvalues, "ranks"), require_convention(convention), size)
    for what, why in found.reasons.items():
        warn(f"ranks: {what} NaN: {why}")
    return found


def stable_rank(eigenvalues: Eigenvalues) -> float:
    """``Σλ/λ_max``: the squared Frobenius norm over the squared spectral norm.

    M. Rudelson & R. Vershynin, J. ACM 54 (2007). NaN, with a warning, where all eigenvalues are zero.

    >>> stable_rank([4.0, 2.0, 2.0])
    2.0
    """
    return ranks(eigenvalues).stable_rank


def log_alpha_norm(eigenvalues: Eigenvalues, alpha: float) -> float:
    """``log10 Σ λ^α``, the log of the weighted Schatten norm, without overflow.

    Martin, Peng & Mahoney, Nature Communications 12 (2021). NaN, with a warning, where no eigenvalue is
    positive.

    >>> round(log_alpha_norm([1.0, 10.0], 2.0), 6)
    2.004321
    """
    ascending = as_eigenvalues(eigenvalues, "log_alpha_norm")
    why = _why_no_scale(ascending) or ("alpha is NaN" if math.isnan(alpha) else None)
    return undefined("log_alpha_norm", why) if why else log_alpha_norm_checked(ascending, alpha)


def log_alpha_norm_checked(ascending: Array, alpha: float) -> float:
    positive = ascending[ascending > 0]
    if not positive.size or math.isnan(alpha):
        return math.nan
    return float(np.logaddexp.reduce(alpha * np.log(positive))) / math.log(10)


def ranks_checked(ascending: Array, convention: Convention, size: int | None) -> Ranks:
    """:func:`ranks` for checked eigenvalues, without the warnings."""
    why = _why_no_scale(ascending)
    if why:
        nan, largest = math.nan, 0.0 if ascending.size else math.nan
        what = "log_norm, log_spectral_norm, stable_rank, participation and entropy are"
        return Ranks(largest, nan, nan, nan, nan, nan, 0, {what: why})
    largest = float(ascending[-1])
    share = ascending / largest
    total = float(share.sum())
    rank = _rank(ascending, convention, size)
    entropy, reason = _entropy(share / total, rank, convention)
    return Ranks(
        lambda_max=largest,
        log_norm=math.log10(total) + math.log10(largest),
        log_spectral_norm=math.log10(largest),
        stable_rank=total,
        participation=total**2 / float((share**2).sum()),
        entropy=entropy,
        rank=rank,
        reasons={"entropy is": reason} if reason else {},
    )


def _why_no_scale(ascending: Array) -> str | None:
    if not ascending.size:
        return "there are no eigenvalues"
    return "all eigenvalues are zero" if ascending[-1] == 0 else None


def _rank(ascending: Array, convention: Convention, size: int | None) -> int:
    if convention == "weightwatcher":
        roots = np.sqrt(ascending)
        return int(np.count_nonzero(roots > relative_cut(roots, size)))
    return int(np.count_nonzero(ascending > relative_cut(ascending, size)))


def _entropy(p: Array, rank: int, convention: Convention) -> tuple[float, str | None]:
    if rank < 2:
        return math.nan, "the rank is 1, and −Σ p ln p / ln rank is 0/0"
    if convention == "weightwatcher":
        shifted = p + _WEIGHTWATCHER_EPSILON
        return float(-(shifted * np.log(shifted)).sum() / math.log(rank + _WEIGHTWATCHER_EPSILON)), None
    inside = p[p > 0]
    return float(-(inside * np.log(inside)).sum() / math.log(rank)), None
