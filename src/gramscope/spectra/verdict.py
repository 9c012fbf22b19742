"""What the numbers of a tail fit add up to, in words."""

from typing import Literal

from gramscope.spectra.rivals import Rival
from gramscope.spectra.tail import TailFit

Verdict = Literal["power law", "truncated power law", "no power law", "undecided", "undefined"]

_LEVEL = 0.1
_ENOUGH = 50


def verdict(fit: TailFit, rivals: dict[str, Rival], p_value: float | None) -> Verdict:
    """Whether a tail fit may be called a power law.

    "no power law" if the bootstrap rules it out or an exponential is likelier, each at the level 0.1; "truncated power
    law" if a cut-off makes it likelier; "power law" if none of it, on 50 eigenvalues or more and with a bootstrap
    made; else "undecided". Clauset, Shalizi & Newman, SIAM Rev. 51 (2009), section 5, and their rule of n ≥ 50.

    >>> import numpy as np
    >>> from gramscope.spectra import fit_tail, p_value, rivals
    >>> x = 1 + np.sqrt(np.arange(300.0))
    >>> fit = fit_tail(x)
    >>> verdict(fit, rivals(x, fit), p_value(x))
    'no power law'
    """
    if fit.reason:
        return "undefined"
    exponential, truncated = rivals["exponential"], rivals["truncated"]
    ruled_out = p_value is not None and p_value < _LEVEL
    # With α = 0 the truncated law is the exponential, and no power law at all.
    plain_exponential = truncated.p < _LEVEL and truncated.parameters["alpha"] <= 0
    if ruled_out or plain_exponential or (exponential.ratio < 0 and exponential.p < _LEVEL):
        return "no power law"
    if fit.n_tail < _ENOUGH or p_value is None:
        return "undecided"
    return "truncated power law" if truncated.p < _LEVEL else "power law"
