"""What the numbers of a tail fit add up to, in words."""

from typing import Literal

import numpy as np

from gramscope.spectra.alternative_tails import Alternative
from gramscope.spectra.shuffled import ShuffledNull
from gramscope.spectra.tail import TailFit

Verdict = Literal[
    "power law", "truncated power law", "no heavier than shuffled", "no power law", "undecided", "undefined"
]

Label = Literal["over-trained", "under-trained", ""]

_LEVEL = 0.1
_ENOUGH = 50
# WeightWatcher 0.7.7, constants.py.
OVER_TRAINED_BELOW, UNDER_TRAINED_ABOVE = 2.0, 6.0


def verdict(
    fit: TailFit, alternatives: dict[str, Alternative], p_value: float | None, null: ShuffledNull | None = None
) -> Verdict:
    """Whether a tail fit may be called a power law.

    "no power law" if the bootstrap rules it out or an exponential is likelier. "no heavier than shuffled" if the same
    entries in random order reach α or λ_max: such a tail comes from the entries or from chance. "power law" if none of
    it holds, on 50 eigenvalues or more, "truncated power law" if a cut-off makes that likelier. Else "undecided": a
    power law is not claimed without a bootstrap, nor without a null of ten shuffles or more. The level of each test is
    0.1. Clauset, Shalizi & Newman, SIAM Rev. 51 (2009), section 5, and their rule of n ≥ 50.

    >>> import numpy as np
    >>> from gramscope.spectra import fit_tail, p_value, alternatives
    >>> x = 1 + np.sqrt(np.arange(300.0))
    >>> fit = fit_tail(x)
    >>> verdict(fit, alternatives(x, fit), p_value(x))
    'no power law'
    """
    alone = verdict_alone(fit, alternatives, p_value)
    if not needs_null(alone):
        return alone
    if null is None:
        return "undecided"
    shuffles = len(null.alpha)
    p_alpha = (1 + np.count_nonzero(null.alpha <= fit.alpha)) / (1 + shuffles)
    p = max(p_alpha, null.p)  # α of noise is wild and one spike makes λ_max: each alone is too little
    if p < _LEVEL:
        return alone
    beyond_all = p <= 1 / (1 + shuffles)
    return "undecided" if beyond_all else "no heavier than shuffled"


def verdict_alone(fit: TailFit, alternatives: dict[str, Alternative], p_value: float | None) -> Verdict:
    """:func:`verdict` before its null is asked: on the eigenvalues alone."""
    if fit.reason:
        return "undefined"
    exponential, truncated = alternatives["exponential"], alternatives["truncated"]
    ruled_out = p_value is not None and p_value < _LEVEL
    # With α = 0 the truncated law is the exponential, and no power law at all.
    plain_exponential = truncated.p < _LEVEL and truncated.parameters["alpha"] <= 0
    if ruled_out or plain_exponential or (exponential.ratio < 0 and exponential.p < _LEVEL):
        return "no power law"
    if fit.n_tail < _ENOUGH or p_value is None:
        return "undecided"
    return "truncated power law" if truncated.p < _LEVEL else "power law"


def needs_null(alone: Verdict) -> bool:
    """Whether the null can still change a verdict on the eigenvalues alone."""
    return alone in ("power law", "truncated power law")


def training_label(alpha: float) -> Label:
    """WeightWatcher's word for a tail exponent: "over-trained" for α < 2, "under-trained" for α > 6, else nothing.

    It is a rule of thumb for large trained models: α of pure noise lies on both sides of 6 (see the verdict).

    >>> training_label(1.7), training_label(3.0), training_label(7.5)
    ('over-trained', '', 'under-trained')
    """
    if alpha < OVER_TRAINED_BELOW:
        return "over-trained"
    return "under-trained" if alpha > UNDER_TRAINED_ABOVE else ""
