"""The gradient flow accumulated in the subspace on which co-activation concentrates (arXiv:2606.09744, eq. 213).

Equation 213 integrates the gradient flow, ``W(t) - W(0) = -∫ ∇_W L dt``, and section 10.3 expects the sum to pile up in
the directions that the co-activation projectors ``P_{μν}`` and the pullback metrics ``M_{μν}`` select. Here that share
is a number. Two subspaces are on offer, both of the layer whose weight W (N, d) and masks σ (n, N) are given:

- ``side="output"``: the neurons that pairs of examples share most, the k largest entries of ``⟨P⟩`` (a diagonal matrix,
  so its eigenvectors are neurons). It acts on the rows of W.
- ``side="input"``: the top k eigenvectors of ``⟨M⟩ = Wᵀ⟨P⟩W``. It acts on the columns of W.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.charts import line_chart
from gramscope.base.checks import check_choice, check_count, check_finite, check_tensor
from gramscope.base.effective_rank import ratio_of_traces
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.base.rounding import Rounding
from gramscope.hierarchy.mask_concentration import Labels, Masks, Pairs, matching, mean_projector, metric_eigen


@dataclass(frozen=True, eq=False, repr=False)
class CoactivationSubspace(Result, shown=("k", "baseline", "side", "values")):
    """The directions that co-activation concentrates on: orthonormal columns ``basis`` (N, k), and how they were found.

    ``values`` are all eigenvalues of ``⟨P⟩`` or ``⟨M⟩``, greatest first; ``k`` of them span the subspace.
    """

    basis: Float64[Tensor, "N k"]
    values: Float64[Tensor, " N"]
    side: str

    @property
    def k(self) -> int:
        return self.basis.shape[1]

    @property
    def baseline(self) -> float:
        """``k / N``: the share of a change that points in no direction in particular."""
        return self.k / len(self.values)

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The eigenvalues, greatest first, with those that span the subspace marked; a figure."""
        places = list(range(1, len(self.values) + 1))
        lines = {"all": self.values, f"subspace, k = {self.k}": self.values[: self.k]}
        return line_chart(places, lines, f"Co-activation, {self.side} side", "rank", axes=axes)

    def part(self, change: Float[Tensor, "rows cols"]) -> Float64[Tensor, "rows cols"]:
        """The part of a weight's change in the subspace: ``Π ΔW`` (rows) or ``ΔW Π`` (columns), ``Π = B Bᵀ``."""
        d = change.detach().to(self.basis)
        if d.dim() != 2 or d.shape[0 if self.side == "output" else 1] != len(self.values):
            raise InputError(
                f"change must have {len(self.values)} {'rows' if self.side == 'output' else 'columns'} to lie in this "
                f"subspace (side={self.side!r}), got shape {tuple(change.shape)}. Pass the change of the same weight."
            )
        return self.basis @ (self.basis.T @ d) if self.side == "output" else (d @ self.basis) @ self.basis.T


def coactivation_subspace(
    weight: Float[Tensor, "N d"],
    masks: Masks,
    labels: Labels = None,
    pairs: Pairs = "all",
    *,
    side: str = "input",
    k: int | None = None,
) -> CoactivationSubspace:
    """The subspace on which co-activation concentrates, of one layer at one time.

    Args:
        weight: W (N, d) of the layer.
        masks: σ (n, N) of the same layer, or slopes of another activation.
        labels, pairs: which pairs of examples are averaged over, see :func:`gramscope.hierarchy.mean_projector`.
        side: "input", top eigenvectors of ``Wᵀ⟨P⟩W`` (d,); or "output", the neurons of largest ``⟨P⟩`` (N,).
        k: how many directions; None takes the participation ratio ``(Σλ)²/Σλ²``, rounded up, so that a concentrated
            spectrum gives a small subspace.

    Reference: arXiv:2606.09744, section 10.3, eqs. 211 to 213.

    Example:
        >>> masks = torch.tensor([[True, False, False], [True, True, False]])
        >>> coactivation_subspace(torch.eye(3), masks, side="output", k=1).basis.flatten().tolist()
        [1.0, 0.0, 0.0]
    """
    check_choice(side, "side", ("input", "output"))
    w, projector = matching(weight, masks), mean_projector(masks, labels, pairs)
    if side == "output":
        values, order = projector.sort(descending=True, stable=True)
        vectors = torch.eye(len(values), dtype=torch.float64, device=values.device)[:, order]
    else:
        values, vectors, _ = metric_eigen(w, projector, Rounding.of(weight))
    return CoactivationSubspace(vectors[:, : _size(values, k)], values, side)


def _size(values: Float64[Tensor, " N"], k: int | None) -> int:
    if k is None:
        if not bool(values.any()):
            raise InputError(
                "masks must be on for some pair of examples, but no two examples share a unit, so co-activation "
                "selects no subspace. Pass more examples, or look for dead units."
            )
        return min(len(values), max(1, math.ceil(float(ratio_of_traces(values.sum(), values.square().sum())) - 1e-9)))
    return check_count(k, "k", most=len(values), why="the size of the space")


@dataclass(frozen=True, repr=False)
class FlowShare(Result, shown=("path_share", "share", "baseline", "excess", "steps")):
    """How much of a weight's change lies in the subspace that co-activation selects.

    - ``share``: ``⟨Σ_s Π_s ΔW_s, ΔW⟩ / |ΔW|²`` of the whole change ``ΔW = Σ_s ΔW_s``. For one step, or a subspace that
      stays, it is ``|Π ΔW|² / |ΔW|²`` and lies in [0, 1]; a subspace that turns may lead outside.
    - ``path_share``: ``Σ_s |Π_s ΔW_s|² / Σ_s |ΔW_s|²``, always in [0, 1].
    - ``baseline``: the share of a change in no direction in particular, ``k / N`` (weighted by ``|ΔW_s|²``).
    - ``steps``: how many changes were added up; steps in which the weight stood still do not count.
    """

    share: float
    path_share: float
    baseline: float
    steps: int

    @property
    def excess(self) -> float:
        """``(path_share - baseline) / (1 - baseline)``: 0 by chance, 1 at most; NaN where k is the whole space."""
        return (self.path_share - self.baseline) / (1 - self.baseline) if self.baseline < 1 else math.nan


def flow_share(change: Float[Tensor, "N d"], subspace: CoactivationSubspace) -> FlowShare:
    """The share of one change ``ΔW`` in one subspace, ``|Π ΔW|² / |ΔW|²`` (arXiv:2606.09744, eq. 213).

    Example:
        >>> masks = torch.tensor([[True, False], [True, False]])
        >>> space = coactivation_subspace(torch.eye(2), masks, side="output", k=1)
        >>> flow_share(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), space).share
        0.36
    """
    flow = AccumulatedFlow()
    flow.add(change, subspace)
    return flow.share()


class AccumulatedFlow:
    """Adds up the changes of a weight, each split by the subspace at its time: eq. 213 as a sum over steps.

    The split is exact: ``inside + outside = Σ_s ΔW_s``. Two matrices of the weight's size are kept.

    Example:
        >>> flow, masks = AccumulatedFlow(), torch.tensor([[True, False], [True, True]])
        >>> before, after = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> flow.add(after - before, coactivation_subspace(before, masks, side="output", k=1))
        >>> flow.share().share, flow.share().steps
        (1.0, 1)
    """

    def __init__(self) -> None:
        self.inside: Float64[Tensor, "N d"] | None = None
        self.total: Float64[Tensor, "N d"] | None = None
        self.steps = 0
        self._inside_squared = self._squared = self._baseline = 0.0

    def __repr__(self) -> str:
        return f"AccumulatedFlow of {self.share()!r}"

    @property
    def outside(self) -> Float64[Tensor, "N d"] | None:
        """What was added outside the subspaces."""
        return None if self.total is None or self.inside is None else self.total - self.inside

    def add(self, change: Float[Tensor, "N d"], subspace: CoactivationSubspace) -> None:
        """Add ``ΔW_s`` with the subspace of that time (the one before the step, which the gradient saw)."""
        check_tensor(change, "change")
        check_finite(change, "change", "Look at the step where training diverged.")
        part, whole = subspace.part(change), change.detach().to(subspace.basis)
        if self.total is not None and self.total.shape != whole.shape:
            raise InputError(
                f"change must keep the shape {tuple(self.total.shape)} of the changes before it, got "
                f"{tuple(whole.shape)}. Use one AccumulatedFlow for each weight."
            )
        size = float(whole.square().sum())
        if size == 0:
            return
        self.total = whole if self.total is None else self.total + whole
        self.inside = part if self.inside is None else self.inside + part
        self._inside_squared += float(part.square().sum())
        self._squared += size
        self._baseline += size * subspace.baseline
        self.steps += 1

    def share(self) -> FlowShare:
        """The shares so far; NaN before the weight has moved (or where it came back to its start)."""
        if self.total is None or self.inside is None:
            return FlowShare(math.nan, math.nan, math.nan, 0)
        whole = float(self.total.square().sum())
        share = float((self.inside * self.total).sum()) / whole if whole else math.nan
        return FlowShare(share, self._inside_squared / self._squared, self._baseline / self._squared, self.steps)
