"""Target linearity: how much of the targets a linear map of the features can say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_count, check_number, check_tensor
from gramscope.base.class_labels import are_labels, class_labels, one_hot_present, target_rows
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows, check_paired
from gramscope.base.nested import ModelInput
from gramscope.base.results import Result
from gramscope.base.rng import stream
from gramscope.base.rounding import EPS64, Rounding, column_basis
from gramscope.base.user_warnings import undefined
from gramscope.capture.activations import At, Layers, Mode
from gramscope.measures.by_weight import ByLayer
from gramscope.measures.layer_features import Reduce, features
from gramscope.measures.measure import Measure
from gramscope.measures.rows import check_size


class TargetLinearityValue(
    float, Result, shown=("value", "null", "excess", "rank", "examples", "permuted", "held_out")
):
    """The target linearity, a float in [0, 1], with what is needed to judge it.

    ``rank`` of the features over ``examples`` rows, ``null`` what targets with no relation to the features reach:
    ``rank / n``, or ``rank / (n - 1)`` where the features are centred, as the targets always are. ``permuted`` and
    ``permuted_std`` are mean and standard deviation over permutations of the targets (NaN if none were drawn);
    ``excess`` is ``(TL - null) / (1 - null)``: 0 for chance, 1 for a perfect fit; ``held_out`` is the value on unseen
    examples (NaN if not asked for).
    """

    rank: int
    examples: int
    center: bool
    permuted: float
    permuted_std: float
    held_out: float

    def __new__(
        cls,
        value: float,
        rank: int,
        examples: int,
        center: bool = False,
        permuted: float = math.nan,
        permuted_std: float = math.nan,
        held_out: float = math.nan,
    ) -> "TargetLinearityValue":
        made = super().__new__(cls, value)
        made.rank, made.examples, made.center, made.held_out = rank, examples, center, held_out
        made.permuted, made.permuted_std = permuted, permuted_std
        return made

    def __reduce__(self) -> tuple[object, ...]:
        chance = (self.rank, self.examples, self.center, self.permuted, self.permuted_std)
        return type(self), (float(self), *chance, self.held_out)

    def __repr__(self) -> str:
        """The value beside what chance reaches, without which it says nothing."""
        return f"{float(self):.4g} (null {self.null:.4g}, rank {self.rank} of {self.examples} examples)"

    @property
    def value(self) -> float:
        return float(self)

    @property
    def null(self) -> float:
        """``rank(H) / n``, the null baseline; of centred features ``rank(H) / (n - 1)``."""
        return self.rank / max(self.examples - self.center, 1)

    @property
    def excess(self) -> float:
        """``(TL - null) / (1 - null)``; NaN where the features span everything and any target fits."""
        return (float(self) - self.null) / (1 - self.null) if self.null < 1 else math.nan


@torch.inference_mode()
def target_linearity(
    features: Tensor,
    targets: Tensor,
    *,
    center: bool = False,
    tol: float | None = None,
    dtype: torch.dtype | None = None,
    permutations: int = 0,
    seed: int = 0,
) -> TargetLinearityValue:
    """The share of the targets in the span of the features.

    ``TL = tr(Yᵀ P_H Y) / tr(YᵀY)``, P_H the projector on the columns of H, Y centred over the examples; by a float64
    SVD of H. A direction of H that is no more than the rounding of its numbers does not count (docs/notation.md).

    Args:
        features: H (n, ...), any floating dtype; axes after the first are flattened.
        targets: Y (n,) or (n, c); integer or bool targets of one axis are classes and become one-hot (cast counts or
            other integer numbers to float yourself).
        center: centre H too, which is a linear map with an offset (then TL is the R² of ordinary least squares).
        tol: cut singular values at this share of the largest instead; None leaves it to the rounding.
        dtype: what H was computed in, where that is less than its own dtype (autocast, TF32: torch.float16). Numbers
            that were only cast up from bfloat16, float16 or float32 are recognised without it.
        permutations: draw this many seeded permutations of the targets, for ``.permuted`` and ``.permuted_std``.
        seed: of the permutations; torch's global stream is not touched.

    Returns a float with ``.rank``, ``.null`` (what unrelated targets reach), ``.excess``, ``.permuted``.
    Read it only beside ``.null``: with as many features as examples TL is 1 whatever they are; see
    :func:`held_out_target_linearity`. Reference: arXiv:2605.06258, Target Linearity.

    Example:
        >>> H = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
        >>> tl = target_linearity(H, H[:, 0] - H[:, 1])
        >>> round(float(tl), 6), tl.rank, tl.null
        (0.981818, 2, 0.5)
    """
    check_count(permutations, "permutations", 0)
    measure = TargetLinearity(center=center, tol=tol, dtype=dtype)
    h, y = _rows(features, _as_rows_alike(targets)[0])
    span, centred = measure._span_of_rows(h, features), _centred_targets(y)
    value = _value(span, centred, len(h), center)
    if permutations == 0 or math.isnan(value):
        return value
    drawn = _permuted(span, centred, permutations, seed)
    std = float(drawn.std()) if permutations > 1 else math.nan
    return TargetLinearityValue(float(value), value.rank, value.examples, center, float(drawn.mean()), std)


@torch.inference_mode()
def target_linearities(features: Mapping[str, Tensor], targets: Tensor) -> dict[str, TargetLinearityValue]:
    """:func:`target_linearity` of several layers; the targets (n, c), which are the same for all, are centred once."""
    measure, y = TargetLinearity(), _checked_rows(targets, "targets")
    centred, found = _centred_targets(y), dict[str, TargetLinearityValue]()
    for name, given in features.items():
        h = _checked_rows(given, "features")
        check_paired(h, y, "features", "targets")
        found[name] = _value(measure._span_of_rows(h, given), centred.to(h.device), len(h), center=False)
    return found


def held_out_target_linearity(
    features: Tensor,
    targets: Tensor,
    test_features: Tensor | None = None,
    test_targets: Tensor | None = None,
    *,
    test_share: float = 0.25,
    center: bool = False,
    tol: float | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> float:
    """Target linearity on examples that the linear map has not seen: ``1 - |Y' - H'B|² / |Y'|²``, ``B = H⁺Y``.

    B is the least-squares map of least norm on ``features`` (n, ...); Y and Y' are centred by the mean of ``targets``.
    At most 1; at or below 0 the map says no more than the mean does. Without a test set a seeded share of the examples
    is held out. ``center``, ``tol`` and ``dtype`` are those of :func:`target_linearity`.

    Example:
        >>> H = torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
        >>> noise = torch.randn(60, generator=torch.Generator().manual_seed(1))
        >>> float(target_linearity(H, noise)) > 0.7, held_out_target_linearity(H, noise) < 0.3
        (True, True)
    """
    if (test_features is None) != (test_targets is None):
        raise InputError("test_features and test_targets must be given together, got one of them.")
    if test_features is None or test_targets is None:
        (h, y), (h_test, y_test) = _split(*_rows(features, _as_rows_alike(targets)[0]), test_share, seed)
    else:
        targets, test_targets = _as_rows_alike(targets, test_targets)
        (h, y), (h_test, y_test) = _rows(features, targets), _rows(test_features, test_targets)
        if h_test.shape[1] != h.shape[1] or y_test.shape[1] != y.shape[1]:
            raise InputError(
                f"test features and targets must have the widths {h.shape[1]} and {y.shape[1]} of the training ones, "
                f"got {h_test.shape[1]} and {y_test.shape[1]}."
            )
    mean_y = y.mean(0)
    mean_h = h.mean(0) if center else torch.zeros_like(h[0])
    measure = TargetLinearity(center=center, tol=tol, dtype=dtype)
    span = measure._basis(h - mean_h, h.norm(dim=0), len(h), Rounding.of(features, dtype))
    # Within its span H has full rank, so a QR factorisation of its transpose gives the map of least norm.
    q, r = torch.linalg.qr((h - mean_h).mT @ span)
    coefficients = q @ torch.linalg.solve_triangular(r.mT, span.mT @ (y - mean_y), upper=False)
    truth = y_test - mean_y
    total = float(truth.square().sum())
    if total <= _no_variance(len(y_test), mean_y):
        return undefined("held-out target linearity", "the held-out targets do not vary about the training mean")
    return 1 - float((truth - (h_test - mean_h) @ coefficients).square().sum()) / total


def layer_target_linearity(
    model: nn.Module,
    x: ModelInput,
    targets: Tensor,
    layers: Layers = "*",
    *,
    test: tuple[ModelInput, Tensor] | None = None,
    reduce: Reduce = "flatten",
    at: At = "output",
    mode: Mode = "eval",
    center: bool = False,
    tol: float | None = None,
    permutations: int = 0,
    seed: int = 0,
) -> ByLayer[TargetLinearityValue]:
    """Target linearity of every chosen layer, in the order of the forward pass, the input ``"(input)"`` first.

    A network that learns features makes them more linear in the targets from layer to layer. Wide layers reach 1 by
    their width alone, so compare ``.excess``, or pass ``test=(x, targets)`` and compare ``.held_out``.

    Args:
        model, x: as for :func:`gramscope.measures.features`; the model is left as it was.
        targets: as for :func:`target_linearity`, one row an example.
        layers: names or globs.
        test: inputs and targets for ``.held_out``.
        reduce, at, mode: how activations become rows, see :func:`gramscope.measures.features`.
        center, tol, permutations, seed: see :func:`target_linearity`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> list(layer_target_linearity(model, torch.randn(9, 3), torch.randn(9)))
        ['(input)', '0', '1', '2']
    """
    found = features(model, x, layers, reduce=reduce, at=at, mode=mode)
    unseen: dict[str, Tensor] = {}
    if test is not None:
        unseen = _with_input(features(model, test[0], layers, reduce=reduce, at=at, mode=mode), test[0])
    values, dtypes = {}, [torch.float64]
    for name, rows in _with_input(found, x).items():
        if name in found:  # the rounding of a layer stays in those after it, whatever their dtype (autocast)
            dtypes.append(rows.dtype)
        dtype = max(dtypes, key=lambda d: torch.finfo(d).eps)
        options: dict[str, Any] = {"center": center, "tol": tol, "dtype": dtype}
        value = target_linearity(rows, targets, permutations=permutations, seed=seed, **options)
        if test is not None:
            value.held_out = held_out_target_linearity(rows, targets, unseen[name], test[1], **options)
        values[name] = value
    return ByLayer(values)


def _with_input(found: dict[str, Tensor], x: ModelInput) -> dict[str, Tensor]:
    if isinstance(x, Tensor) and x.is_floating_point():
        return {"(input)": x.detach().flatten(1) if x.dim() > 1 else x.detach()[:, None], **found}
    return found


@dataclass(frozen=True, eq=False)
class TriangularState:
    """``R`` of a QR factorisation of the rows [H, 1, Y]: all inner products of their columns, at full precision.

    Two are merged by the QR factorisation of one on top of the other. The Gram matrix ``RᵀR`` would do too, at half the
    digits. ``features`` is p. H and Y are taken relative to ``shift``, their first row, so that no digits go to a mean
    far from zero; with 1 among the columns another shift is a sum of columns.
    """

    n: int
    features: int
    rows: Float[Tensor, "rows columns"]
    shift: Float[Tensor, " columns"]
    rounding: Rounding

    def about(self, shift: Float[Tensor, " columns"]) -> Float[Tensor, "rows columns"]:
        """The rows relative to another shift."""
        return self.rows + torch.outer(self.rows[:, self.features], self.shift - shift)

    def covariance(self) -> Float[Tensor, "p p"]:
        """``HᵀH``."""
        h = self.about(torch.zeros_like(self.shift))[:, : self.features]
        return h.mT @ h

    def merged(self, other: "TriangularState") -> "TriangularState":
        # Labels of no examples do not tell how many classes there are.
        same_targets = self.rows.shape[1] == other.rows.shape[1] or self.n == 0 or other.n == 0
        if self.features != other.features or not same_targets:
            raise InputError(
                f"states of the same widths can be merged, got {self.features} and {other.features} features, "
                f"{self.rows.shape[1] - self.features - 1} and {other.rows.shape[1] - other.features - 1} targets. For "
                "class labels that may be missing from a batch, say TargetLinearity(classes=...)."
            )
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        stacked = torch.cat([self.rows, other.about(self.shift.to(other.rows)).to(self.rows)])
        rounding = self.rounding.merged(other.rounding)
        return TriangularState(self.n + other.n, self.features, _triangular(stacked), self.shift, rounding)


class TargetLinearity(Measure[TriangularState, TargetLinearityValue]):
    """Target linearity batch by batch, in memory of (p + c)²; see :func:`target_linearity`.

    ``classes`` is the number of classes where targets are labels. The null by permutation needs all examples together.

    >>> measure, H, Y = TargetLinearity(), torch.randn(20, 3), torch.randn(20, 2)
    >>> state = measure.merge(measure.update(H[:5], Y[:5]), measure.update(H[5:], Y[5:]))
    >>> abs(measure.compute(state) - target_linearity(H, Y)) < 1e-12
    True
    """

    def __init__(
        self,
        *,
        center: bool = False,
        tol: float | None = None,
        classes: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if tol is not None:
            check_number(tol, "tol", least=0.0, below=1.0)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(
                f"dtype must be a floating one of torch, of the arithmetic that made the features, got {dtype!r}."
            )
        self.center, self.tol, self.classes, self.dtype = center, tol, classes, dtype

    def update(self, features: Tensor, targets: Tensor) -> TriangularState:
        state = self._stacked(features, target_rows(targets, self.classes), least=0)
        return replace(state, rows=_triangular(state.rows))

    def compute(self, state: TriangularState) -> TargetLinearityValue:
        if state.n == 0:
            raise InputError("target linearity needs examples, got none.")
        return _value(*self._span(state), state.n, self.center)

    def _stacked(self, features: Tensor, targets: Tensor, least: int) -> TriangularState:
        """The rows [H, 1, Y] themselves, an example each: the state before its QR factorisation."""
        h, y = _rows(features, targets, least=least)
        first_h, first_y = (rows[0] if len(rows) else rows.new_zeros(rows.shape[1]) for rows in (h, y))
        shift = torch.cat([first_h, h.new_zeros(1), first_y])
        rows = torch.cat([h - first_h, h.new_ones(len(h), 1), y - first_y], dim=1)
        return TriangularState(len(h), h.shape[1], rows, shift, Rounding.of(features, self.dtype))

    def _span(self, state: TriangularState) -> tuple[Float[Tensor, "rows r"], Float[Tensor, "rows c"]]:
        """An orthonormal basis of the features' columns, and the centred targets; zero where they do not vary."""
        # An orthogonal map of the rows changes no inner product, so R serves as the data; 1 is then its own column.
        p, one = state.features, state.rows[:, state.features : state.features + 1]
        whole = state.about(torch.zeros_like(state.shift))
        h, y = whole[:, :p], whole[:, p + 1 :]
        mean, lengths = (one.mT @ y) / state.n, h.norm(dim=0)
        centred = _varying(_centred(state.rows[:, p + 1 :], one, state.n), mean, state.n)
        h = _centred(state.rows[:, :p], one, state.n) if self.center else h
        return self._basis(h, lengths, state.n, state.rounding), centred

    def _span_of_rows(self, h: Float[Tensor, "n p"], given: Tensor) -> Float[Tensor, "n r"]:
        """An orthonormal basis of the columns of rows in float64; ``given`` are the features in their own dtype."""
        lengths = h.norm(dim=0)
        return self._basis(_about_mean(h)[0] if self.center else h, lengths, len(h), Rounding.of(given, self.dtype))

    def _basis(self, h: Tensor, lengths: Tensor, n: int, rounding: Rounding) -> Float[Tensor, "rows r"]:
        """An orthonormal basis of H; ``lengths`` are those of its columns before they were centred."""
        if self.tol is None:
            return column_basis(h, rounding, n, lengths)
        u, s, _ = torch.linalg.svd(_triangular(h.mT).mT, full_matrices=False)  # U needs no p columns
        return u[:, (s > self.tol * s[0]) & (s > EPS64 * lengths.norm())]


def _value(span: Tensor, centred: Tensor, n: int, center: bool) -> TargetLinearityValue:
    total = float(centred.square().sum())
    if total == 0:
        nan = undefined("target linearity", f"the targets do not vary over the {n} examples")
        return TargetLinearityValue(nan, span.shape[1], n, center)
    value = min(1.0, float((span.mT @ centred).square().sum()) / total)
    return TargetLinearityValue(value, span.shape[1], n, center)


def _permuted(span: Tensor, centred: Tensor, permutations: int, seed: int) -> Float[Tensor, " draws"]:
    """Target linearity of permuted targets."""
    rng = stream(seed, "target linearity", "permutations")
    total = centred.square().sum()
    orders = (torch.randperm(len(centred), generator=rng, device="cpu").to(centred.device) for _ in range(permutations))
    return torch.stack([(span.mT @ centred[order]).square().sum() / total for order in orders])


def _rows(features: Tensor, targets: Tensor, *, least: int = 1) -> tuple[Tensor, Tensor]:
    h, y = _checked_rows(features, "features", least), _checked_rows(targets, "targets", least)
    check_paired(h, y, "features", "targets")
    return h, y.to(h.device)


def _checked_rows(x: Tensor, what: str, least: int = 1) -> Float[Tensor, "n p"]:
    rows = as_rows(x, what)
    if len(rows) < least or rows.shape[1] == 0:
        raise InputError(f"features and targets must not be empty, got {what} of shape {tuple(x.shape)}.")
    check_size(x, what, power=2)
    return rows


def _as_rows_alike(*targets: Tensor) -> Sequence[Tensor]:
    """Labels of all sets as one-hot rows of the classes in any of them; other targets as they are."""
    if not all(are_labels(check_tensor(t, "targets")) for t in targets):
        return targets
    return one_hot_present(torch.cat([class_labels(t).cpu() for t in targets])).split([len(t) for t in targets])


def _split(h: Tensor, y: Tensor, share: float, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    held = round(check_number(share, "test_share", above=0.0, below=1.0) * len(h))
    if not 0 < held < len(h):
        raise InputError(f"test_share must leave at least one example on both sides, got {share} of {len(h)} examples.")
    rng = stream(seed, "target linearity", "split")
    order = torch.randperm(len(h), generator=rng, device="cpu").to(h.device)
    return (h[order[held:]], y[order[held:]]), (h[order[:held]], y[order[:held]])


def _no_variance(n: int, mean: Tensor) -> float:
    """Sums of squares about the mean of n rows that are rounding of the mean itself."""
    return n * float(mean.square().sum()) * EPS64**2 * 1e4


def _centred_targets(y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    centred, mean = _about_mean(y)
    return _varying(centred, mean, len(y))


def _about_mean(rows: Float[Tensor, "n p"]) -> tuple[Float[Tensor, "n p"], Float[Tensor, " p"]]:
    """Rows minus their mean, and that; all about the first row, so that no digits go to a mean far from zero."""
    shifted = rows - rows[0]
    mean = shifted.mean(0)
    return shifted - mean, rows[0] + mean


def _varying(centred: Tensor, mean: Tensor, n: int) -> Tensor:
    """The centred targets; zero where they are rounding."""
    return centred if float(centred.square().sum()) > _no_variance(n, mean) else torch.zeros_like(centred)


def _centred(rows: Tensor, one: Tensor, n: int) -> Tensor:
    """What is left of the rows without their part along ``one``."""
    return rows - one * ((one.mT @ rows) / n)


def _triangular(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows, mode="r")[1] if len(rows) > rows.shape[1] else rows
