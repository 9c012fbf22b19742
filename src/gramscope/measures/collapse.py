"""Neural collapse: whether the features of a class fall onto one point, and the points onto a simplex."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gramscope.base.checks import check_count, check_number
from gramscope.base.class_labels import class_labels
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows
from gramscope.base.results import Result
from gramscope.base.user_warnings import undefined, warn
from gramscope.measures.class_moments import ClassStatistics
from gramscope.measures.measure import Measure
from gramscope.measures.rows import PairedRows, Rows


@dataclass(frozen=True, repr=False)
class NeuralCollapse(Result):
    """The four conditions of neural collapse and the class-distance variance; all are 0 in full collapse.

    ``within`` and ``between`` are traces of Σ_W and Σ_b summed over the classes, ``mean_within`` is the mean Tr Σ_W.
    ``nc3`` and ``nc4`` are None where no classifier was given. ``notes`` says what of the data limits the numbers.
    """

    nc1: float
    nc2: float
    nc2_equinorm: float
    nc2_equiangular: float
    nc2_maximal_angle: float
    nc3: float | None
    nc4: float | None
    cdnv: float
    within: float
    mean_within: float
    between: float
    examples: int
    counts: Mapping[int, int] = field(repr=False)
    missing: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class Collapse(Measure[PairedRows, NeuralCollapse]):
    """Neural collapse, batch by batch: ``update(features, labels, outputs=None)``.

    With class means μ_c, their mean μ̄ and M the rows ``μ_c - μ̄``: ``Σ_b = MᵀM/C``, ``Σ_W = Σ_c Cov_c(φ)/C``, and

    - NC1 ``Tr(Σ_b† Σ_W)``, the pseudo-inverse of rank at most C-1; with ``ridge`` ε ``Tr((Σ_b + ε)⁻¹ Σ_W)``;
    - NC2 ``|MMᵀ/|MMᵀ| - (1 - 11ᵀ/C)/√(C-1)|``; its three parts are the coefficient of variation of |μ_c - μ̄|, the
      standard deviation of their cosines, and the mean of ``|cos + 1/(C-1)|``;
    - NC3 ``|W/|W| - M/|M||²`` for the classifier's weight W (C, p);
    - NC4 the share of examples where the classifier disagrees with the nearest class mean;
    - CDNV the mean over pairs of ``(Var_c + Var_c')/(2|μ_c - μ_c'|²)``.

    Every class has the same weight, whatever its size. The state keeps the rows, in their own dtype.

    Directions of the class means that are no more than rounding of the features do not count (docs/notation.md).

    Reference: arXiv:2008.08186 (NC1-NC4); arXiv:2105.02375, eq. 4 (NC2); arXiv:2112.15121, definition 1 (CDNV);
    arXiv:2410.04264, appendix H.2 (ridge 1e-4). Its proposition 1 sums over classes; its published numbers fit means.

    >>> features, labels = torch.tensor([[0.0], [0.2], [1.0], [1.2]]), torch.tensor([0, 0, 1, 1])
    >>> measure = Collapse()
    >>> state = measure.merge(measure.update(features[:3], labels[:3]), measure.update(features[3:], labels[3:]))
    >>> round(measure.compute(state).nc1, 6)
    0.04
    """

    def __init__(
        self,
        *,
        classes: int | Sequence[int] | None = None,
        weight: Float[Tensor, "K p"] | None = None,
        bias: Float[Tensor, " K"] | None = None,
        ridge: float = 0.0,
    ) -> None:
        check_number(ridge, "ridge", least=0.0, hint="0 is the pseudo-inverse.")
        if bias is not None and weight is None:
            raise InputError("bias belongs to a classifier: pass its weight (K, p) too.")
        named = classes if classes is None or isinstance(classes, Iterable) else range(check_count(classes, "classes"))
        self.classes = None if named is None else tuple(named)
        self.weight = None if weight is None else as_rows(weight, "weight")
        self.bias = None if bias is None else as_rows(bias, "bias")[:, 0]
        if bias is not None and self.weight is not None and bias.shape != self.weight.shape[:1]:
            raise InputError(
                f"bias must have one entry for each of the weight's {len(self.weight)} rows, got {tuple(bias.shape)}."
            )
        self.ridge = ridge

    def update(self, features: Tensor, labels: Tensor, outputs: Tensor | None = None) -> PairedRows:
        labels = class_labels(labels, negative=self.classes is not None)
        if isinstance(features, Tensor) and 0 in features.shape[1:]:
            raise InputError(f"features must have at least one column, got shape {tuple(features.shape)}.")
        if self.classes is not None:
            unknown = sorted(set(labels.tolist()) - set(self.classes))
            if unknown:
                raise InputError(f"labels must be among the given classes, but {unknown[:5]} are not. Check classes=.")
        state = PairedRows.of(features=features, labels=labels, outputs=outputs)
        width = state.kinds["features"].width
        if self.weight is not None and self.weight.shape[1] != width:
            raise InputError(
                f"the classifier's weight must have shape (K, {width}) to match the features, got "
                f"{tuple(self.weight.shape)}. Pass last.weight and the inputs of that layer."
            )
        return state

    def compute(self, state: PairedRows) -> NeuralCollapse:
        if state.n == 0:
            raise InputError("neural collapse needs examples, got none.")
        rows, labels = state.kinds["features"], state.kinds["labels"]
        found = ClassStatistics.of(rows, labels.all()[:, 0].long())
        missing = tuple(c for c in self.classes or () if c not in found.labels)
        notes = _notes(found, missing, rows.width)
        count = len(found.labels)
        if count < 2:
            nan = undefined(
                "neural collapse", f"all {state.n} examples are of one class, so there is no between-class scatter"
            )
            nc1 = nc2 = cdnv = nan
            parts = (nan, nan, nan)
        else:
            nc1 = _nc1(found, self.ridge)
            nc2, parts = _nc2(found)
            cdnv = _cdnv(found)
        within = float(found.variances.sum())
        return NeuralCollapse(
            nc1=nc1,
            nc2=nc2,
            nc2_equinorm=parts[0],
            nc2_equiangular=parts[1],
            nc2_maximal_angle=parts[2],
            nc3=None if self.weight is None else _nc3(found, self.weight),
            nc4=_nc4(found, state.kinds.get("outputs"), self.weight, self.bias),
            cdnv=cdnv,
            within=within,
            mean_within=within / count,
            between=float(found.centred.square().sum()),
            examples=state.n,
            counts=dict(zip(found.labels, found.counts.long().tolist(), strict=True)),
            missing=missing,
            notes=notes,
        )


@torch.inference_mode()
def neural_collapse(
    features: Tensor,
    labels: Tensor,
    outputs: Tensor | None = None,
    *,
    weight: Float[Tensor, "K p"] | None = None,
    bias: Float[Tensor, " K"] | None = None,
    classes: int | Sequence[int] | None = None,
    ridge: float = 0.0,
) -> NeuralCollapse:
    """Neural collapse of the features of labelled examples: NC1 to NC4 and the class-distance variance.

    ``NC1 = Tr(Σ_b† Σ_W)``; the rest is defined at :class:`Collapse`. All numbers are 0 in full collapse.

    Args:
        features: Φ (n, ...), as a rule the inputs of the last linear layer.
        labels: classes (n,) of any integer dtype, or one-hot rows (n, C); negative ones only if among ``classes``.
        outputs: outputs (n, K) of the network, for NC4; column k is class k.
        weight: weight (K, p) of the classifier, for NC3 (and NC4 where no outputs are given, with ``bias``).
        bias: bias (K,) of the classifier.
        classes: how many classes there are, or which; those without examples are named in ``missing``.
        ridge: 0 for the pseudo-inverse; 1e-4 is that of arXiv:2410.04264, and makes NC1 a rescaled ``mean_within``.

    Reference: Papyan, Han & Donoho 2020 (arXiv:2008.08186); arXiv:2410.04264, proposition 1.

    Example:
        >>> import torch, gramscope as gs
        >>> labels = torch.arange(12) % 3
        >>> found = gs.measures.neural_collapse(torch.eye(3)[labels], labels, weight=torch.eye(3) - 1 / 3)
        >>> found.nc1 < 1e-12, found.nc2 < 1e-12, found.nc3 < 1e-12, found.nc4
        (True, True, True, 0.0)
    """
    return Collapse(classes=classes, weight=weight, bias=bias, ridge=ridge)(features, labels, outputs)


def _notes(found: ClassStatistics, missing: tuple[int, ...], width: int) -> tuple[str, ...]:
    notes = []
    count = len(found.labels)
    if missing:
        notes.append(f"classes without examples are left out: {list(missing)[:10]}")
        warn(f"neural collapse: {len(missing)} of the classes have no example and are left out: {list(missing)[:10]}.")
    alone = [label for label, n in zip(found.labels, found.counts.tolist(), strict=True) if n == 1]
    if alone:
        notes.append(f"classes with one example have no within-class scatter and pull NC1 and CDNV down: {alone[:10]}")
    if count > width + 1:
        notes.append(f"{count} class means in {width} dimensions cannot form a simplex, so NC2 cannot reach 0")
    if count == 2:
        notes.append("two centred class means are always opposite, so NC2 is 0 whatever the network does")
    return tuple(notes)


def _nc1(found: ClassStatistics, ridge: float) -> float:
    s, directions = found.along_means()
    if len(s) == 0 or float(s[0]) <= found.rounding_of_means:
        return undefined("NC1", "all class means coincide, so the between-class scatter is zero")
    along = found.within_along(directions)
    squares = s.square()
    if ridge == 0:
        return float((along / squares).sum())
    # Here both are sums over the classes, so the ridge of their means counts as often.
    ridge = ridge * len(found.labels)
    rest = max(float(found.variances.sum() - along.sum()), 0.0)
    outside = rest / ridge if ridge else math.inf if rest else 0.0
    return float((along / (squares + ridge)).sum()) + outside


def _nc2(found: ClassStatistics) -> tuple[float, tuple[float, float, float]]:
    m, count = found.centred, len(found.labels)
    norms = m.norm(dim=1)
    floor = found.rounding_of_means
    if float(norms.max()) <= floor:
        nan = undefined("NC2", "all class means coincide")
        return nan, (nan, nan, nan)
    gram = m @ m.mT
    simplex = torch.eye(count, dtype=torch.float64, device=m.device) - 1 / count
    distance = float((gram / gram.norm() - simplex / math.sqrt(count - 1)).norm())
    equinorm = float(norms.std(correction=0) / norms.mean())
    if float(norms.min()) <= floor:
        label = found.labels[int(norms.argmin())]
        nan = undefined("the angle part of NC2", f"the mean of class {label} is the mean of all classes")
        return distance, (equinorm, nan, nan)
    unit = m / norms[:, None]
    cosines = (unit @ unit.mT)[~torch.eye(count, dtype=torch.bool, device=m.device)]
    angular = float(cosines.std(correction=0)) if count > 2 else 0.0
    return distance, (equinorm, angular, float((cosines + 1 / (count - 1)).abs().mean()))


def _nc3(found: ClassStatistics, weight: Float[Tensor, "K p"]) -> float:
    places = _columns(found.labels, len(weight), "the classifier's weight")
    w, m = weight.to(found.centred.device)[places], found.centred
    if float(w.norm()) == 0 or float(m.norm()) <= found.rounding_of_means:
        return undefined("NC3", "the classifier's weight or the scatter of the class means is zero")
    return float((w / w.norm() - m / m.norm()).square().sum())


def _nc4(found: ClassStatistics, outputs: Rows | None, weight: Tensor | None, bias: Tensor | None) -> float | None:
    wrong = 0
    for some, rows in found.rows.blocks():
        if outputs is not None:
            scores, source = outputs.block(some.start, some.stop).to(rows.device), "outputs"
        elif weight is not None:
            scores, source = rows @ weight.to(rows.device).mT, "the classifier's weight"
            scores += 0.0 if bias is None else bias.to(rows.device)
        else:
            return None
        places = _columns(found.labels, scores.shape[1], source).to(rows.device)
        nearest = _distances(found.centre.centred(rows), found.centred).argmin(1)
        wrong += int((scores.argmax(1) != places[nearest]).sum())
    return wrong / found.rows.n


def _columns(labels: tuple[int, ...], width: int, what: str) -> Int[Tensor, " C"]:
    if min(labels) < 0 or max(labels) >= width:
        raise InputError(
            f"{what} must have one row or column for each class, numbered from 0; it has {width} and the labels run "
            f"from {min(labels)} to {max(labels)}. Renumber the labels, or leave the classifier out."
        )
    return torch.tensor(labels, device="cpu")


def _distances(a: Float[Tensor, "n p"], b: Float[Tensor, "m p"]) -> Float[Tensor, "n m"]:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # which would lose digits of near points


def _cdnv(found: ClassStatistics) -> float:
    gaps = _distances(found.centred, found.centred).square()
    above = torch.triu_indices(len(gaps), len(gaps), 1, device="cpu")
    gaps = gaps[above[0], above[1]]
    sums = (found.variances[:, None] + found.variances[None])[above[0], above[1]]
    if bool((gaps <= found.rounding_of_means**2).any()):
        return undefined("CDNV", "two classes have the same mean, so their distance is zero")
    return float((sums / (2 * gaps)).mean())
