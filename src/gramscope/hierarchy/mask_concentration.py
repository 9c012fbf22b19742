"""Concentration over training: do co-activation and the pullback metric narrow, and do the weights follow?

The question that arXiv:2606.09744 leaves open (its section 9 is empty). Each function
takes plain tensors of one training step, so that a recorder can call it at any step: weights ``W^ℓ``
(N_ℓ, N_{ℓ-1}) and masks ``σ^ℓ`` (n, N_ℓ), or the slopes φ'(h) of another activation. No metric of a single pair is
formed, and no n × n matrix but where it is asked for; all sums are in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from gramscope.base.charts import line_chart
from gramscope.base.checks import check_choice, check_count, check_finite, check_symmetric, check_tensor
from gramscope.base.effective_rank import participation_ratio_of, ratio_of_traces
from gramscope.base.errors import InputError
from gramscope.base.moments import centered_rows
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.base.rounding import EPS64, Rounding, singular_floor
from gramscope.base.user_warnings import undefined

Masks = Bool[Tensor, "n units"] | Int[Tensor, "n units"] | Float[Tensor, "n units"]
Labels = Int[Tensor, " examples"] | None
Pairs = str | tuple[int, int]


def overlap_rank(field: Masks, *, center: bool = False) -> float:
    """Participation ratio ``tr(C)² / tr(C²)`` of the overlap ``C_{μν} = u_μ·u_ν`` of a field (masks, signals).

    Between 1 and min(n, N). ``center`` takes the mean over examples off first: fields that are never negative share
    one large direction, which hides the others. So the plain rank of masks of many independent units that are on half
    of the time is near 4 for any number of examples; the centred one counts the patterns beside the mean one.
    NaN, with a warning, if there is nothing to rank: a field that is zero (or, centred, the same for all examples).

    >>> overlap_rank(torch.eye(3, dtype=torch.float64))
    3.0
    >>> masks = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    >>> overlap_rank(masks), overlap_rank(masks, center=True)
    (2.0, 1.0)
    """
    u = checked_matrix(field, "the field")
    u = centered_rows(u) if center else u
    # Rounding of the mean must not pass for a spread.
    rounding = max(1e3 * EPS64, Rounding.of(field).relative)
    if float(u.abs().max()) <= rounding * float(field.double().abs().max()):
        why = "the field is zero everywhere" if not bool(field.any()) else "it is the same for all examples"
        return undefined("a participation ratio", why if len(field) > 1 or not center else "one example has no spread")
    u = u / u.abs().max()
    # C and its N × N companion share their nonzero eigenvalues; take the smaller.
    return participation_ratio_of(u @ u.T if u.shape[0] <= u.shape[1] else u.T @ u)


def coactivation(masks: Masks) -> Float64[Tensor, "n n"]:
    """Co-activation overlap ``C_{μν} = σ_μ·σ_ν``: how many units two examples both switch on (arXiv:2606.09744).

    Numbers other than 0 and 1 are taken for slopes φ'(h) of another activation, and a unit counts by their product; of
    activations or signals this is their overlap, not a count of units.

    >>> coactivation(torch.tensor([[True, True, False], [False, True, False]])).tolist()
    [[2.0, 1.0], [1.0, 1.0]]
    """
    sigma = checked_matrix(masks, "masks")
    return sigma @ sigma.T


def mean_projector(
    masks: Masks, labels: Labels = None, pairs: Pairs = "all", *, self_pairs: bool = True
) -> Float64[Tensor, " N"]:
    """Diagonal of the co-activation projector ``P_{μν} = D_μ D_ν``, averaged over pairs of examples.

    ``pairs``: "all", "same" or "different" class, or a tuple (a, b) for μ in class a, ν in class b; every pair weighs
    the same. Sums over pairs are products of sums, ``Σ_{μ∈a, ν∈b} σ_μ σ_ν = s_a s_b``. The pairs μ = ν count unless
    ``self_pairs=False``; they add the unit's own rate, ``(s² − Σσ²) / (n(n−1))`` is what is left without them.

    >>> masks, labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> mean_projector(masks, labels, (0, 0)).tolist(), mean_projector(masks, labels, (0, 1)).tolist()
    ([1.0, 0.25], [0.0, 0.5])
    >>> mean_projector(masks, labels, (0, 0), self_pairs=False).tolist()
    [1.0, 0.0]
    """
    sigma = checked_matrix(masks, "masks")
    n = len(sigma)
    if labels is not None:
        _labels(labels, n)  # also where "all" has no use for them: they would be those of other examples
    whole, own = sigma.sum(0), sigma.pow(2).sum(0)
    if isinstance(pairs, tuple):
        first, second = (_members(labels, n, label, sigma.device) for label in pairs)
        total, count = sigma[first].sum(0) * sigma[second].sum(0), float(first.sum() * second.sum())
        itself, alone = (sigma[first].pow(2).sum(0), float(first.sum())) if pairs[0] == pairs[1] else (0 * own, 0.0)
    elif pairs == "all":
        total, count, itself, alone = whole**2, float(n * n), own, float(n)
    elif pairs in ("same", "different"):
        places = torch.unique(_labels(labels, n), return_inverse=True)[1].to(sigma.device)
        sums, sizes = class_sums(sigma, places), torch.bincount(places).double()
        total, count, itself, alone = sums.pow(2).sum(0), float(sizes.pow(2).sum()), own, float(n)
        if pairs == "different":
            total, count, itself, alone = whole**2 - total, n * n - count, 0 * own, 0.0
    else:
        raise InputError(f"pairs must be 'all', 'same', 'different' or a tuple (a, b) of two labels, got {pairs!r}.")
    if not self_pairs:
        total, count = total - itself, count - alone
    if bool((sigma >= 0).all()):
        total = total.clamp(min=0.0)  # a difference of equal sums may round below zero
    if count < 0.5:
        raise InputError(
            f"there must be a pair to average over, but {pairs!r} has none (self_pairs={self_pairs}). Pass more "
            "examples or other classes."
        )
    return total / count


def class_metric(
    weight: Float[Tensor, "N_next in"],
    masks: Masks,
    labels: Labels = None,
    pairs: Pairs = "all",
    *,
    self_pairs: bool = True,
) -> Float64[Tensor, "in in"]:
    """Class-averaged pullback metric ``⟨M^ℓ_{μν}⟩ = W^{ℓ+1,T} ⟨P^{ℓ+1}_{μν}⟩ W^{ℓ+1}`` (arXiv:2606.09744).

    ``weight`` is W^{ℓ+1} and ``masks`` are those of layer ℓ+1; pairs as in :func:`mean_projector`.

    >>> class_metric(torch.eye(2), torch.tensor([[True, False], [True, True]])).tolist()
    [[1.0, 0.0], [0.0, 0.25]]
    """
    w = matching(weight, masks)
    return w.T @ (mean_projector(masks, labels, pairs, self_pairs=self_pairs)[:, None] * w)


def metric_spectrum(
    weight: Float[Tensor, "N_next in"],
    masks: Masks,
    labels: Labels = None,
    pairs: Pairs = "all",
    *,
    self_pairs: bool = True,
) -> Float64[Tensor, " N"]:
    """Eigenvalues of :func:`class_metric`, greatest first; never negative where masks are not.

    >>> metric_spectrum(torch.eye(2), torch.tensor([[True, False], [True, True]])).tolist()
    [1.0, 0.25]
    """
    w, rounding = matching(weight, masks), Rounding.of(weight)
    return metric_eigen(w, mean_projector(masks, labels, pairs, self_pairs=self_pairs), rounding)[0]


@dataclass(frozen=True, repr=False)
class SubspaceOverlap(Result, shown=("overlap", "baseline", "excess", "k", "gap", "undefined")):
    """Overlap of two k-dimensional eigenspaces, ``|UᵀV|² / k``: 1 the same, 0 orthogonal, ``baseline`` by chance.

    ``gap`` is the smaller of the two relative gaps ``(λ_k − λ_{k+1}) / λ_1``: near 0 the k-th direction is arbitrary
    and the overlap with it. ``undefined`` says why ``overlap`` is NaN, if it is.
    """

    overlap: float
    baseline: float
    k: int
    gap: float
    undefined: str | None = None

    @property
    def excess(self) -> float:
        """``(overlap − baseline) / (1 − baseline)``: 0 by chance, 1 at best; NaN when k is the whole space."""
        return (self.overlap - self.baseline) / (1.0 - self.baseline) if self.baseline < 1 else float("nan")


def subspace_overlap(first: Float[Tensor, "N N"], second: Float[Tensor, "N N"], k: int) -> SubspaceOverlap:
    """Overlap of the top-k eigenspaces of two symmetric matrices, ``|U_kᵀ V_k|² / k``, the mean cos² of their angles.

    A random pair of k-dimensional spaces in N dimensions overlaps by k/N on average.

    >>> first, second = torch.diag(torch.tensor([3.0, 2.0, 0.0])), torch.diag(torch.tensor([3.0, 0.0, 2.0]))
    >>> subspace_overlap(first, second, k=1).overlap, subspace_overlap(first, second, k=2).overlap
    (1.0, 0.5)
    """
    return _overlap(_eigen(first), _eigen(second), k)


def update_alignment(
    update: Float[Tensor, "rows cols"],
    weight: Float[Tensor, "N_next in"],
    masks: Masks,
    labels: Labels = None,
    pairs: Pairs = "all",
    *,
    k: int,
    side: str = "input",
    self_pairs: bool = True,
) -> SubspaceOverlap:
    """Overlap of the top-k eigenspace of an accumulated weight change with that of the class-averaged metric ``M^ℓ``.

    Both live on layer ℓ. ``side="input"``: ``update`` is ``ΔW^{ℓ+1} = W^{ℓ+1}(t) − W^{ℓ+1}(0)``, its space that of
    ``ΔWᵀΔW``. ``side="output"``: ``update`` is ``ΔW^ℓ``, its space that of ``ΔW ΔWᵀ``, which the backward signals span
    and M^ℓ moves. ``weight`` and ``masks`` are those of layer ℓ+1, as in :func:`class_metric`.

    >>> weight = torch.diag(torch.tensor([2.0, 1.0]))
    >>> a = update_alignment(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), weight, torch.ones(3, 2), k=1)
    >>> a.overlap, a.baseline
    (1.0, 0.5)
    """
    check_choice(side, "side", ("input", "output"))
    w = matching(weight, masks)
    delta = checked_matrix(update, "update")
    delta = delta if side == "input" else delta.T
    if delta.shape[1] != w.shape[1]:
        lines, layer = ("columns", "the same layer as weight") if side == "input" else ("rows", "the layer below")
        raise InputError(
            f"update must have {w.shape[1]} {lines}, the width of the metric's layer, got shape {tuple(update.shape)}. "
            f"Pass ΔW of {layer}."
        )
    projector = mean_projector(masks, labels, pairs, self_pairs=self_pairs)
    metric = metric_eigen(w, projector, Rounding.of(weight))
    return _overlap(_factor_eigen(delta, singular_floor(delta, Rounding.of(update))), metric, k)


@dataclass(frozen=True, eq=False, repr=False)
class Concentration(Result, shown=("layer", "coactivation_rank", "centred_rank", "metric_rank")):
    """What :func:`concentration` found for one weight ``W^{ℓ+1}`` (``layer`` = ℓ+1, from 1)."""

    layer: int
    coactivation_rank: float
    centred_rank: float
    spectrum: Float64[Tensor, " N"]
    metric_rank: float
    alignment: SubspaceOverlap | None
    incoming_alignment: SubspaceOverlap | None

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The spectrum of co-activation on a logarithmic axis; a figure."""
        places = list(range(1, len(self.spectrum) + 1))
        title = f"Layer {self.layer}: effective rank {self.coactivation_rank:.3g}"
        return line_chart(places, {"spectrum": self.spectrum}, title, "rank", axes=axes, xscale="log", yscale="log")


def concentration(
    weights: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    labels: Labels = None,
    initial_weights: Sequence[Tensor] | None = None,
    *,
    k: int = 5,
    pairs: Pairs = "all",
    self_pairs: bool = True,
) -> list[Concentration]:
    """Ranks, overlaps and alignment of co-activation and of the pullback metric, for each layer at one training step.

    ``weights`` are W^1..W^L, ``masks`` σ^1..σ^L (a leading None for layer 0 is dropped). With ``initial_weights`` the
    accumulated change ``W − W(0)`` of each layer, and of the one below it, is aligned with the metric; k is cut to the
    width of the layer.

    >>> _ = torch.manual_seed(0)
    >>> w, x = [torch.randn(6, 4), torch.randn(5, 6)], torch.randn(8, 4)
    >>> h = [x @ w[0].T]
    >>> h.append(h[0].relu() @ w[1].T)
    >>> [c.layer for c in concentration(w, [None, *(z > 0 for z in h)], k=2)]
    [1, 2]
    """
    present = [mask for mask in masks if mask is not None]
    if len(present) != len(weights):
        raise InputError(f"masks must hold one tensor for each of the {len(weights)} weights, got {len(present)}.")
    if initial_weights is not None and [w.shape for w in initial_weights] != [w.shape for w in weights]:
        raise InputError("initial_weights must have the shapes of weights, layer by layer. Copy them before training.")
    check_count(k, "k")
    deltas = None if initial_weights is None else list(map(_change, weights, initial_weights))
    found = []
    for place, (weight, mask) in enumerate(zip(weights, present, strict=True)):
        w, projector = matching(weight, mask), mean_projector(mask, labels, pairs, self_pairs=self_pairs)
        metric = metric_eigen(w, projector, Rounding.of(weight))
        size = min(k, w.shape[1])
        found.append(
            Concentration(
                layer=place + 1,
                coactivation_rank=overlap_rank(mask),
                centred_rank=overlap_rank(mask, center=True),
                spectrum=metric[0],
                metric_rank=float(ratio_of_traces(metric[0].sum(), metric[0].square().sum())),
                alignment=None if deltas is None else _overlap(_factor_eigen(*deltas[place]), metric, size),
                incoming_alignment=_incoming(deltas, place, metric, size),
            )
        )
    return found


# Eigenvalues, greatest first, their vectors, and the rank: how many are positive and more than rounding.
Eigen = tuple[Float64[Tensor, " N"], Float64[Tensor, "N N"], int]


def _change(weight: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """``W − W(0)``, and which singular values of it are rounding of W, which may be far larger."""
    w, v = weight.detach().double(), initial.detach().double()
    return w - v, torch.maximum(*(singular_floor(m, Rounding.of(t)) for m, t in ((w, weight), (v, initial))))


def _incoming(deltas: list[tuple[Tensor, Tensor]] | None, place: int, metric: Eigen, k: int) -> SubspaceOverlap | None:
    # A bias kept as a last column of the next weight has no row in the one below: the two spaces differ, no comparison.
    if deltas is None or place == 0 or len(deltas[place - 1][0]) != len(metric[0]):
        return None
    below, floor = deltas[place - 1]
    return _overlap(_factor_eigen(below.T, floor), metric, k)


def metric_eigen(w: Float64[Tensor, "N_next N"], diagonal: Float64[Tensor, " N_next"], rounding: Rounding) -> Eigen:
    if bool((diagonal < 0).any()):  # slopes of a smooth activation can be negative, and then the mean metric is not PSD
        return _eigen(w.T @ (diagonal[:, None] * w))
    factor = diagonal.sqrt()[:, None] * w
    return _factor_eigen(factor, singular_floor(factor, rounding))


def _factor_eigen(factor: Float64[Tensor, "m N"], floor: Float64[Tensor, " 1"]) -> Eigen:
    """Eigenpairs of ``FᵀF``, greatest first, from the singular values of F: squares cannot turn negative."""
    _, singular, vectors = torch.linalg.svd(factor, full_matrices=True)
    values = torch.zeros(factor.shape[1], dtype=torch.float64, device=factor.device)
    values[: len(singular)] = singular.pow(2)
    return values, vectors.mT, int((singular > floor).sum())


def _eigen(matrix: Float[Tensor, "N N"]) -> Eigen:
    m = checked_matrix(matrix, "the matrix")
    check_symmetric(m, "the matrix", tol=1e-5, remedy="Pass ΔWᵀΔW, not ΔW.")
    values, vectors = torch.linalg.eigh((m + m.T) / 2)
    floor = max(1e-12 * float(values[-1]), float(singular_floor(m, Rounding.of(matrix))))
    return values.flip(0), vectors.flip(1), int((values > floor).sum())


def _overlap(first: Eigen, second: Eigen, k: int) -> SubspaceOverlap:
    n = len(first[0])
    if len(second[0]) != n:
        raise InputError(f"the two matrices must act on one space, got sizes {n} and {len(second[0])}.")
    check_count(k, "k", most=n, why="the size of the space")
    gap = 1.0
    for values, _, positive in (first, second):
        if positive < k:
            reason = f"a matrix has {positive} positive eigenvalues, too few for a top eigenspace of dimension {k}"
            return SubspaceOverlap(float("nan"), k / n, k, 0.0, reason)
        gap = min(gap, float(values[k - 1] - values[k]) / float(values[0]) if k < n else 1.0)
    cosines = first[1][:, :k].T @ second[1][:, :k]
    return SubspaceOverlap(min(1.0, float(cosines.pow(2).sum()) / k), k / n, k, gap)


def class_sums(rows: Float64[Tensor, "n N"], places: Int[Tensor, " n"]) -> Float64[Tensor, "classes N"]:
    """The sum of the rows of each class; ``places`` number the classes from 0."""
    return rows.new_zeros(int(places.max()) + 1, rows.shape[1]).index_add_(0, places, rows)


def _members(labels: Tensor | None, n: int, label: int, device: torch.device) -> Tensor:
    given = _labels(labels, n)
    members = (given == label).to(device)
    if not bool(members.any()):
        raise InputError(f"class {label} must have an example, but the labels are {torch.unique(given).tolist()}.")
    return members


def _labels(labels: Tensor | None, n: int) -> Tensor:
    if labels is None:
        raise InputError('labels must be given to average over classes. Pass them, or pairs="all".')
    if check_tensor(labels, "labels").shape != (n,):
        raise InputError(f"labels must have one entry for each of the {n} examples, got shape {tuple(labels.shape)}.")
    return labels


def matching(weight: Tensor, masks: Tensor) -> Float64[Tensor, "N_next N"]:
    """The weight in float64; raise unless each of its rows has a column of masks."""
    check_tensor(weight, "weight")
    check_tensor(masks, "masks")
    if weight.dim() != 2 or masks.dim() != 2 or weight.shape[0] != masks.shape[1]:
        raise InputError(
            f"masks must have one column for each row of weight, got masks {tuple(masks.shape)} and weight "
            f"{tuple(weight.shape)}. M^ℓ takes W and masks of layer ℓ+1 both."
        )
    return checked_matrix(weight, "weight")


def checked_matrix(tensor: Tensor, what: str) -> Float64[Tensor, "rows cols"]:
    """In float64; raise unless it has rows and columns, and is finite."""
    check_tensor(tensor, what)
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise InputError(f"{what} must be a matrix with rows and columns, got shape {tuple(tensor.shape)}.")
    check_finite(tensor, what, "Look at the step where training diverged.")
    return tensor.detach().double()
