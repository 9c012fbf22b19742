"""Do similar inputs share active units, and unrelated ones not? Co-activation within and between classes.

Section 10.3 of arXiv:2606.09744 expects that "similar inputs may progressively share activation subspaces, while
unrelated inputs may separate into distinct activation regions". With classes as the notion of similar this is the gap
between two means over pairs of examples, beside what shuffled labels give.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from gramscope.base.checks import check_choice, check_count
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import child_seed, generator
from gramscope.hierarchy.mask_concentration import Masks, checked_matrix, class_sums


@dataclass(frozen=True, repr=False)
class SharedActivation(
    Result, shown=("gap", "z", "p_value", "within", "between", "permutations", "examples", "silent")
):
    """Co-activation overlap of pairs within and between classes, with the null of shuffled labels.

    ``null_mean`` and ``null_std`` are those of the gap ``within - between`` over ``permutations`` shuffled labels (NaN
    if none were drawn); ``silent`` counts examples that switch no unit on, which are left out of a cosine.
    """

    within: float
    between: float
    null_mean: float
    null_std: float
    p_value: float
    permutations: int
    examples: int
    silent: int

    @property
    def gap(self) -> float:
        """``within - between``: above 0, examples of one class share more units than examples of two."""
        return self.within - self.between

    @property
    def z(self) -> float:
        """``(gap - null_mean) / null_std``; NaN without permutations or where all of them agree."""
        return (self.gap - self.null_mean) / self.null_std if self.null_std > 0 else math.nan


def shared_activation(
    masks: Masks,
    labels: Tensor,
    *,
    overlap: str = "cosine",
    permutations: int = 200,
    seed: int = 0,
) -> SharedActivation:
    """Co-activation overlap within and between classes, and how far shuffled labels reach.

    ``within`` is the mean of ``c_{μν}`` over pairs μ ≠ ν of one class, ``between`` over pairs of two classes, with
    ``c_{μν} = σ_μ·σ_ν / (|σ_μ| |σ_ν|)`` ("cosine", which does not depend on the rate of firing) or
    ``σ_μ·σ_ν / N`` ("units", the paper's overlap). All pairs are counted through sums over classes,
    ``Σ_{μ∈a,ν∈b} c_{μν} = s_a·s_b``; no n × n matrix is formed.

    Args:
        masks: σ (n, N), or slopes of another activation.
        labels: classes (n,), whole numbers; at least two classes, one of them with two examples.
        overlap: as above.
        permutations: how many shuffled labels the null is drawn from (0: none).
        seed: of the permutations; torch's own stream is not touched.

    Reference: arXiv:2606.09744, eq. 51 (overlap) and section 10.3.

    Example:
        >>> masks = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1]])
        >>> found = shared_activation(masks, torch.tensor([0, 0, 1, 1]), permutations=0)
        >>> round(found.within, 3), round(found.between, 3)
        (0.854, 0.25)
    """
    rows, places, silent = _rows(masks, labels, overlap)
    sizes = torch.bincount(places).double()
    n, own = len(rows), float(rows.square().sum())
    total, pairs = float(rows.sum(0).square().sum()), float(sizes.square().sum())
    counts = pairs - n, n * n - pairs
    if n < 2 or min(counts) <= 0:
        raise InputError(
            f"labels must give pairs within a class and pairs between two, got {len(sizes)} classes for {n} examples "
            f"that switch a unit on ({silent} do not). Pass more examples of two classes at least."
        )

    def means(order: Tensor) -> tuple[float, float]:
        inside = float(class_sums(rows, places[order]).square().sum())
        return (inside - own) / counts[0], (total - inside) / counts[1]

    within, between = means(torch.arange(n, device=places.device))
    null = [a - b for a, b in (means(order) for order in _orders(n, permutations, seed, places.device))]
    gaps = torch.tensor(null, dtype=torch.float64, device="cpu")
    mean = float(gaps.mean()) if null else math.nan
    std = float(gaps.std()) if len(null) > 1 else math.nan
    # The data are one of the orders, so that the chance is never 0 (Phipson & Smyth 2010).
    beyond = int((gaps >= within - between - 1e-12).sum())
    p = (1 + beyond) / (1 + len(null)) if null else math.nan
    return SharedActivation(within, between, mean, std, p, len(null), n, silent)


def _rows(masks: Tensor, labels: Tensor, overlap: str) -> tuple[Float64[Tensor, "n N"], Int[Tensor, " n"], int]:
    check_choice(overlap, "overlap", ("cosine", "units"))
    sigma = checked_matrix(masks, "masks")
    if not isinstance(labels, Tensor) or labels.shape != (len(masks),) or labels.is_floating_point():
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"labels must be whole numbers, one for each of the {len(masks)} examples, got {got}.")
    places = labels.to(masks.device)
    silent = 0
    if overlap == "units":
        sigma = sigma / sigma.shape[1] ** 0.5
    else:
        lengths = sigma.norm(dim=1)
        on = lengths > 0
        silent = int((~on).sum())
        sigma, places = sigma[on] / lengths[on, None], places[on]
    return sigma, torch.unique(places, return_inverse=True)[1], silent


def _orders(n: int, permutations: int, seed: int, device: torch.device) -> list[Tensor]:
    check_count(permutations, "permutations", 0)
    rng = generator(child_seed(seed, "shared activation", "permutations"))
    return [torch.randperm(n, generator=rng, device="cpu").to(device) for _ in range(permutations)]
