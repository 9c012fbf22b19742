"""The three curves behind richness: how good, how used and how strong the eigenfunctions of the features are."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.charts import line_chart
from gramscope.base.checks import check_choice, check_tensor
from gramscope.base.class_labels import are_labels, class_labels, one_hot_present
from gramscope.base.effective_rank import effective_rank
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import TableResult
from gramscope.base.rounding import above_rounding, column_basis, floor
from gramscope.base.user_warnings import undefined, warn
from gramscope.measures.measure import Measure
from gramscope.measures.rows import PairedRows, Rows

Part = Literal["evaluation", "train"]

LEAST = torch.finfo(torch.float64).tiny / torch.finfo(torch.float64).eps  # ρ_1 below this has lost digits


@dataclass(frozen=True, eq=False, repr=False)
class Curves(
    TableResult,
    shown=("effective_dimension", "rank", "target_rank", "output_rank", "notes"),
    columns=("quality", "utilisation"),
):
    """Quality Π*(k), utilisation Π̂(k) and intensity ρ_k/ρ_1 of the first k eigenfunctions, k from 1.

    ``quality`` and ``utilisation`` have one entry for each of the ``rank`` eigenfunctions that are more than rounding
    of the features; None where no targets or outputs were given. ``intensity`` and ``eigenvalues`` have one for each
    feature.
    """

    quality: Float[Tensor, " rank"] | None = field(repr=False)
    utilisation: Float[Tensor, " rank"] | None = field(repr=False)
    intensity: Float[Tensor, " p"] = field(repr=False)
    eigenvalues: Float[Tensor, " p"] = field(repr=False)
    rank: int
    target_rank: int
    output_rank: int
    effective_dimension: float
    examples: int
    notes: tuple[str, ...] = ()

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """Quality, utilisation and relative intensity over the number of eigenfunctions; a figure."""
        given = {"quality": self.quality, "utilisation": self.utilisation, "relative intensity": self.intensity}
        lines = {name: curve for name, curve in given.items() if curve is not None}
        places = list(range(1, len(self.intensity) + 1))
        return line_chart(places, lines, "Richness curves", "eigenfunctions k", axes=axes)


@dataclass(frozen=True, eq=False)
class CurvesState:
    """Training features; evaluation features with targets and outputs. Each is None while there is none.

    ``train`` are the rows of ``trained`` examples; where these are many, those of R in ``Φ = QR``, which has the same
    ``ΦᵀΦ``.
    """

    train: Rows | None
    trained: int
    evaluation: PairedRows | None

    def merged(self, other: "CurvesState") -> "CurvesState":
        train = self.train.merged(other.train) if self.train and other.train else self.train or other.train
        if train and train.n > 4 * train.width:
            train = replace(train, chunks=(torch.linalg.qr(train.all(), mode="r")[1],))
        seen, more = self.evaluation, other.evaluation
        return CurvesState(train, self.trained + other.trained, seen.merged(more) if seen and more else seen or more)


class RichnessCurves(Measure[CurvesState, Curves]):
    """Quality, utilisation and intensity, batch by batch.

    ``update(features, part="train")`` adds training features, ``update(features, targets, outputs)`` adds evaluation
    examples. With ``Σ = ΦᵀΦ/n = U diag(ρ) Uᵀ`` (training, uncentred, ρ descending) the eigenfunctions are
    ``e_k(x) = Φ(x)ᵀu_k/√ρ_k`` on the evaluation set; a reduced QR in this order gives q_k; with B an orthonormal basis
    of the targets' span (quality) or of the outputs' (utilisation), of rank r, ``Π(k) = (1/r) Σ_{j≤k} |Bᵀq_j|²``.

    Reference: arXiv:2410.04264, eq. 5, sections 5.1-5.2 and appendix J.1 (Nyström method).
    """

    def update(
        self,
        features: Tensor,
        targets: Tensor | None = None,
        outputs: Tensor | None = None,
        *,
        part: Part = "evaluation",
    ) -> CurvesState:
        check_choice(part, "part", get_args(Part))
        if part == "train":
            if targets is not None or outputs is not None:
                raise InputError("training features take no targets or outputs: these belong to the evaluation set.")
            rows = Rows.of(features, "features")
            return CurvesState(rows, rows.n, None)
        if targets is None and outputs is None:
            raise InputError("evaluation features need targets (for quality), outputs (for utilisation) or both.")
        labels = None
        if targets is not None and are_labels(check_tensor(targets, "targets")):
            # Which classes there are is known only in the end, so labels stay labels until then.
            labels, targets = class_labels(targets), None
        return CurvesState(None, 0, PairedRows.of(features=features, labels=labels, targets=targets, outputs=outputs))

    def compute(self, state: CurvesState) -> Curves:
        if state.train is None or state.evaluation is None or state.evaluation.n == 0:
            absent = "training features" if state.train is None else "evaluation set"
            raise InputError(
                "the curves need training features, update(features, part='train'), and an evaluation set, "
                f"update(features, targets, outputs); got no {absent}."
            )
        given = state.evaluation.kinds
        rho, strong, u = feature_modes(state.train, state.trained)
        phi = given["features"].all()
        if phi.shape[1] != len(rho):
            raise InputError(
                f"training and evaluation features must be of one width, got {len(rho)} and {phi.shape[1]}."
            )
        if float(rho[0]) < LEAST:
            nan = undefined("the eigenfunctions", "all training features are zero")
            empty = phi.new_zeros(0)
            return Curves(empty, empty, rho * nan, rho, 0, 0, 0, nan, len(phi))
        notes = _notes(len(strong), len(phi), phi.shape[1], state.trained)
        own = _along(u, given["features"].rounding.errors(phi.norm(dim=0)))
        q = orthonormalised(phi @ u / strong.sqrt(), own / strong.sqrt())
        targets = Rows.of(one_hot_present(given["labels"].all()[:, 0])) if "labels" in given else given.get("targets")
        quality, target_rank = _cumulative(q, targets, "targets")
        utilisation, output_rank = _cumulative(q, given.get("outputs"), "outputs")
        dimension = effective_dimension(strong)
        ranks = len(strong), target_rank, output_rank
        return Curves(quality, utilisation, rho / rho[0], rho, *ranks, dimension, len(phi), notes)


def richness_curves(
    train_features: Tensor, features: Tensor, targets: Tensor | None = None, outputs: Tensor | None = None
) -> Curves:
    """Quality, utilisation and intensity of the eigenfunctions of the training features on an evaluation set.

    ``Π(k) = (1/r) Σ_{j≤k} |Bᵀq_j|²``: the share of the targets (or outputs) that the first k eigenfunctions hold.

    Args:
        train_features: Φ (n, p) on training examples; gives Σ.
        features: Φ (m, p) on evaluation examples, m > p.
        targets: targets (m, C), or labels (m,), of the evaluation examples; gives the quality.
        outputs: outputs (m, C) of the network there; gives the utilisation.

    Reference: arXiv:2410.04264, eq. 5 and section 5.2.

    Example:
        >>> import torch, gramscope as gs
        >>> labels = torch.arange(60) % 3
        >>> phi = torch.eye(3, 5)[labels] * torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0])
        >>> gs.measures.richness_curves(phi, phi, labels).quality.round(decimals=6).tolist()
        [0.333333, 0.666667, 1.0]
    """
    measure = RichnessCurves()
    train = measure.update(train_features, part="train")
    return measure.compute(measure.merge(train, measure.update(features, targets, outputs)))


def effective_dimension(eigenvalues: Float[Tensor, " p"]) -> float:
    """``1 + effective_rank(ρ_2..ρ_p)``: how many eigenfunctions carry the features.

    The largest eigenvalue belongs to the constant function (Σ is uncentred) and counts as one dimension by itself. NaN,
    with a warning, where all are zero; those below zero by rounding count as zero.

    Reference: arXiv:2410.04264, appendix B.4 (effective dimension) and D.2 (the constant function).

    Example:
        >>> round(effective_dimension(torch.tensor([9.0, 1.0, 1.0, 1.0])), 12)
        4.0
    """
    whole = effective_rank(eigenvalues)  # checks them, and warns where all are zero
    rest = eigenvalues.detach().double().sort(descending=True).values[1:].clamp(min=0)
    if math.isnan(whole) or not bool(rest.any()):
        return whole
    return 1.0 + effective_rank(rest)


def orthonormalised(e: Float[Tensor, "n k"], noise: Float[Tensor, " k"] | float = 0.0) -> Float[Tensor, "n k"]:
    """Columns made orthonormal in their order; a column of which those before it leave only ``noise`` becomes zero."""
    width = min(e.shape)
    floors = torch.as_tensor(noise, dtype=e.dtype, device=e.device).maximum(1e-10 * e.norm(dim=0))
    q, r = torch.linalg.qr(e[:, :width])
    if bool((r.diagonal().abs() > floors[:width]).all()):
        return torch.cat([q, q.new_zeros(len(e), e.shape[1] - width)], 1)
    # Householder QR puts an arbitrary direction where a column is dependent, and it would count as an eigenfunction.
    q = torch.zeros_like(e)
    for k in range(e.shape[1]):
        rest = e[:, k]
        for _ in range(2):
            rest = rest - q[:, :k] @ (q[:, :k].mT @ rest)
        length = rest.norm()
        if float(length) > float(floors[k]):
            q[:, k] = rest / length
    return q


def feature_modes(train: Rows, n: int) -> tuple[Float[Tensor, " p"], Float[Tensor, " r"], Float[Tensor, "p r"]]:
    """Eigenvalues of ``ΦᵀΦ/n``, descending; those that are more than rounding of the features; and their vectors."""
    if n == 0 or train.width == 0:
        raise InputError("features must have rows and columns, got none: they have no eigenfunction.")
    rho, u = _spectrum(train, n)
    shown = rho[: u.shape[1]]
    # Σ is XᵀX/n, so its diagonal holds the mean squares of the columns.
    noise = _along(u, train.rounding.errors((u.square() @ shown).sqrt())) * floor(n, len(rho))
    kept = above_rounding(shown, noise.square())
    return rho, shown[kept], u[:, kept]


def _spectrum(train: Rows, n: int) -> tuple[Float[Tensor, " p"], Float[Tensor, "p r"]]:
    """ρ descending and U; zeros fill up where there are fewer examples than features."""
    rho = torch.zeros(train.width, dtype=torch.float64, device=train.device)
    if train.n >= train.width:
        total = torch.diag(rho)
        for _, block in train.blocks():
            total.addmm_(block.mT, block)
        rho, u = torch.linalg.eigh(total / n)
        return rho.flip(0).clamp(min=0), u.flip(1)
    _, s, v = torch.linalg.svd(train.all(), full_matrices=False)
    rho[: len(s)] = s.square() / n
    return rho, v.mT


def _along(vectors: Float[Tensor, "p k"], errors: Float[Tensor, " p"]) -> Float[Tensor, " k"]:
    """The size, along each direction, of independent errors of the columns."""
    return (vectors.square().mT @ errors.square()).sqrt()


def _cumulative(q: Float[Tensor, "n k"], rows: Rows | None, what: str) -> tuple[Float[Tensor, " k"] | None, int]:
    if rows is None:
        return None, 0
    y = rows.all()
    basis = column_basis(y, rows.rounding, len(y), y.norm(dim=0))
    rank = basis.shape[1]
    if rank == 0:
        return q.new_full((q.shape[1],), undefined(f"the curve of the {what}", f"all {what} are zero")), 0
    return (basis.mT @ q).square().sum(0).cumsum(0) / rank, rank


def _notes(rank: int, examples: int, width: int, trained: int) -> tuple[str, ...]:
    notes = []
    if rank >= examples:
        notes.append(
            f"{rank} eigenfunctions on {examples} evaluation examples span everything, so the curves reach 1 whatever "
            f"the features are; use more than {width} evaluation examples"
        )
    if trained <= width:
        notes.append(f"{trained} training examples do not determine all {width} eigenfunctions")
    if notes:
        warn(f"richness curves: {'; '.join(notes)}.")
    return tuple(notes)
