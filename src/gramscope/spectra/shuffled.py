"""The shuffled-weights null: what the same entries would give in random order."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from gramscope.base.checks import check_count
from gramscope.base.progress_bar import progress
from gramscope.base.results import TableResult
from gramscope.base.rng import stream
from gramscope.spectra.eigenvalues import Array, as_stack, pooled_squared_singular_values, relative_cut
from gramscope.spectra.marchenko_pastur import fit_marchenko_pastur_checked
from gramscope.spectra.tail import Convention, fit_checked, require_convention


@dataclass(frozen=True, repr=False)
class ShuffledNull(TableResult, shown=("p", "distance", "alpha"), columns=("alpha", "lambda_max", "traps")):
    """Spectra of a weight with its entries shuffled; one row, or one number, a shuffle.

    ``distance`` is the Kolmogorov distance between the weight's own spectrum and all shuffled ones together, ``p``
    the share of shuffles whose λ_max reaches the weight's own (counting the weight itself as one). ``traps`` counts
    eigenvalues above the Marchenko-Pastur edge after the shuffle, which only a few huge entries can cause.
    """

    eigenvalues: Float64[np.ndarray, "shuffles n"]
    alpha: Float64[np.ndarray, " shuffles"]
    lambda_max: Float64[np.ndarray, " shuffles"]
    traps: Int64[np.ndarray, " shuffles"]
    distance: float
    p: float


@torch.no_grad()
def shuffled_null(
    weight: Shaped[Tensor, "..."] | np.ndarray,
    *,
    shuffles: int = 10,
    seed: int = 0,
    convention: Convention = "gramscope",
) -> ShuffledNull:
    """Shuffle the entries of a weight and take its spectrum again: what stays comes from the entries, not their order.

    ``W* = W[π]`` with a random permutation π of all entries (of all matrices of a stack). Correlations, and so learnt
    structure, are gone; the distribution of the entries stays. A heavy tail that survives comes from heavy-tailed
    entries. Martin & Mahoney, JMLR 22 (2021), section 3.

    ``weight``: (rows, cols) or a stack of such. One seed gives one null; no global random stream is touched, and the
    weight is not written to.

    >>> W = torch.outer(torch.arange(1.0, 41.0), torch.ones(30)) + torch.eye(40, 30)
    >>> null = shuffled_null(W, shuffles=5)
    >>> null.alpha.shape, null.distance > 0.5
    ((5,), True)
    """
    stack = as_stack(weight)
    own = pooled_squared_singular_values(stack, "weight")
    with progress("shuffling", shuffles) as step:
        return shuffled_null_checked(stack, own, shuffles, seed, require_convention(convention), step=step)


def shuffled_null_checked(
    stack: Float[Tensor, "k rows cols"],
    own: Array,
    shuffles: int,
    seed: int,
    convention: Convention,
    scale: float = 1.0,
    step: Callable[[], None] = lambda: None,
) -> ShuffledNull:
    """:func:`shuffled_null` for a stack whose own eigenvalues are known; λ are multiplied by ``scale``."""
    check_count(shuffles, "shuffles")
    rng = stream(seed, "shuffled")
    shape = (int(stack.shape[1]), int(stack.shape[2]))
    spectra, fits, traps = [], [], []
    flat = stack.reshape(-1)
    for _ in range(shuffles):
        order = torch.randperm(flat.numel(), generator=rng, device="cpu").to(flat.device)
        values = scale * pooled_squared_singular_values(flat[order].reshape(stack.shape), "the shuffled weight")
        spectra.append(values)
        fits.append(fit_checked(values, convention))
        traps.append(fit_marchenko_pastur_checked(values, shape, convention).spikes)
        step()
    eigenvalues = np.stack(spectra)
    rounding = relative_cut(own, max(shape))
    largest = eigenvalues[:, -1] if eigenvalues.shape[1] else np.full(shuffles, np.nan)
    return ShuffledNull(
        eigenvalues=eigenvalues,
        alpha=np.array([fit.alpha for fit in fits]),
        lambda_max=largest,
        traps=np.array(traps, dtype=np.int64),
        distance=_kolmogorov(own, np.sort(eigenvalues.reshape(-1)), rounding),
        p=float((1 + np.count_nonzero(largest >= own[-1] - rounding)) / (1 + shuffles)) if own.size else float("nan"),
    )


def _kolmogorov(a: Array, b: Array, rounding: float) -> float:
    """Greatest difference of two empirical distribution functions, of ascending values; ties are up to rounding."""
    if not a.size or not b.size:
        return float("nan")
    points = np.concatenate([a, b]) + rounding
    below_a = np.searchsorted(a, points, side="right") / a.size
    below_b = np.searchsorted(b, points, side="right") / b.size
    return float(np.abs(below_a - below_b).max())
