"""Target linearity and neural collapse on the same features: what one says about the other.

The relation is derived here and stated in docs/linearity.md. With λ_1..λ_{C-1} the squared canonical correlations of
features and classes, ``TL`` is the mean of the λ_i, and NC1 of what the best linear map makes of the features, ``P_H
Y``, is ``Σ (1 - λ_i)/λ_i``. ``(1-λ)/λ`` is convex, which gives the bounds.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gramscope.base.class_labels import class_labels, one_hot
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows, check_paired
from gramscope.base.results import TableResult
from gramscope.base.rounding import Rounding, column_basis
from gramscope.capture.activations import At, Layers, Mode
from gramscope.measures.by_weight import ByLayer
from gramscope.measures.collapse import neural_collapse
from gramscope.measures.layer_features import Reduce, features


@dataclass(frozen=True, eq=False, repr=False)
class LinearityCollapse(TableResult, columns=("correlations",)):
    """Target linearity, collapse and the bounds between them, of one set of features.

    - ``target_linearity``: with an offset and with classes that weigh the same; for classes of one size it is
      ``target_linearity(features, labels, center=True)``
    - ``nc1``: ``tr(Σ_B† Σ_W)`` of the features; ``fitted_nc1``: of the best linear map of them, ``Σ (1-λ)/λ``
    - ``lower`` and ``upper``: the bounds on ``fitted_nc1`` by the target linearity (``upper`` is infinite where
      ``(C-1)(1-TL) ≥ 1``); ``lower`` bounds ``nc1`` as well
    - ``correlations``: λ_1..λ_{C-1}, greatest first; zeros where the features have fewer directions
    - ``simplex_gap``: ``|M - (1 - 11ᵀ/C)|`` of the class means M of the fitted outputs, at most ``(C-1)(1-TL)``
    - ``null``: what unrelated targets reach, ``rank / (n - 1)``
    """

    target_linearity: float
    nc1: float
    fitted_nc1: float
    lower: float
    upper: float
    simplex_gap: float
    correlations: Float[Tensor, " C_minus_1"]
    null: float
    classes: int

    @property
    def cancelled(self) -> float:
        """``nc1 - fitted_nc1``: within-class spread along the means that a linear map cancels; never negative."""
        return self.nc1 - self.fitted_nc1


def linearity_collapse(features: Tensor, labels: Tensor, *, dtype: torch.dtype | None = None) -> LinearityCollapse:
    """Target linearity and neural collapse of the same features, and the bounds that tie them.

    Args:
        features: H (n, ...), axes after the first are flattened.
        labels: classes (n,) or one-hot rows; two classes at least. Classes may differ in size: each weighs the same.
        dtype: what the features were computed in, as for :func:`gramscope.measures.target_linearity`.

    Reference: arXiv:2605.06258 (target linearity and neural collapse); NC1 of arXiv:2008.08186.

    Example:
        >>> H = torch.tensor([[0.0, 1.0], [0.0, 3.0], [1.0, 1.0], [1.0, 3.0]])
        >>> found = linearity_collapse(H, torch.tensor([0, 0, 1, 1]))
        >>> round(found.target_linearity, 12), round(found.fitted_nc1, 12), round(found.nc1, 12)
        (1.0, 0.0, 0.0)
    """
    rows, places = as_rows(features, "features"), class_labels(labels)
    check_paired(rows, places, "features", "labels")
    present, places = torch.unique(places.to(rows.device), return_inverse=True)
    classes = len(present)
    if classes < 2:
        raise InputError(
            f"labels must be of two classes at least, got {classes}: with one class nothing lies between classes."
        )
    cosines, sines, gap, rank = _angles(rows, places, classes, Rounding.of(features, dtype))
    value = float(cosines.square().mean())
    found = neural_collapse(features, labels)
    lower, upper = collapse_bounds(value, classes)
    fitted = float((sines.square() / cosines.square()).sum()) if float(cosines[-1]) > 0 else math.inf
    null = rank / max(len(rows) - 1, 1)
    return LinearityCollapse(value, found.nc1, fitted, lower, upper, gap, cosines.square(), min(null, 1.0), classes)


def collapse_bounds(target_linearity: float, classes: int) -> tuple[float, float]:
    """Least and greatest NC1 of the fitted outputs that this target linearity allows.

    >>> collapse_bounds(0.9, classes=2)
    (0.11111111111111108, 0.11111111111111108)
    """
    if not 0 <= target_linearity <= 1 or classes < 2:
        raise InputError(
            f"target_linearity must lie in [0, 1] and classes be at least 2, got {target_linearity} and {classes}."
        )
    rest = 1 - target_linearity
    lower = (classes - 1) * rest / target_linearity if target_linearity else math.inf
    spread = (classes - 1) * rest
    return lower, spread / (1 - spread) if spread < 1 else math.inf


def layer_linearity_collapse(
    model: nn.Module,
    x: object,
    labels: Tensor,
    layers: Layers = "*",
    *,
    reduce: Reduce = "flatten",
    at: At = "output",
    mode: Mode = "eval",
) -> ByLayer[LinearityCollapse]:
    """:func:`linearity_collapse` of every chosen layer, in the order of the forward pass.

    Arguments as for :func:`gramscope.measures.layer_target_linearity`. A layer wider than the examples are many reaches
    target linearity 1 by its width alone; ``null`` says so.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> found = layer_linearity_collapse(model, torch.randn(9, 3), torch.arange(9) % 2, ["0", "2"])
        >>> all(v.lower <= v.fitted_nc1 * (1 + 1e-9) and v.fitted_nc1 <= v.nc1 * (1 + 1e-9) for v in found.values())
        True
    """
    found = features(model, x, layers, reduce=reduce, at=at, mode=mode)
    return ByLayer({name: linearity_collapse(rows, labels, dtype=rows.dtype) for name, rows in found.items()})


def _angles(
    rows: Float[Tensor, "n p"], places: Int[Tensor, " n"], classes: int, rounding: Rounding
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"], float, int]:
    """Cosines (greatest first) and sines of the angles between features and centred classes; the simplex gap; rank.

    Sines are measured, not taken from cosines: near 1 these have no digits left to tell.
    """
    counts = torch.bincount(places, minlength=classes).double()
    weight = (classes * counts[places]).rsqrt()[:, None]  # every class weighs 1/C
    means = rows.new_zeros(classes, rows.shape[1]).index_add_(0, places, rows) / counts[:, None]
    h, lengths = weight * (rows - means.mean(0)), (weight * rows).norm(dim=0)
    span = column_basis(h, rounding, len(h), lengths) if bool(lengths.any()) else h[:, :0]
    hot = one_hot(places, classes)
    indicator = weight * hot * classes**0.5  # orthonormal columns
    # An orthonormal basis of the vectors over classes that sum to zero.
    simplex = torch.linalg.qr(torch.eye(classes, dtype=torch.float64, device=h.device)[:, 1:] - 1 / classes)[0]
    centred = indicator @ simplex
    inside = span.mT @ centred
    cosines = torch.zeros(classes - 1, dtype=torch.float64, device=h.device)
    if min(inside.shape):
        found = torch.linalg.svdvals(inside).clamp(max=1.0)
        cosines[: len(found)] = found
    sines = torch.linalg.svdvals(centred - span @ inside).clamp(max=1.0).flip(0)
    # Class means of the fitted outputs: M = Yᵀ P Y in the metric of the weights.
    missing = inside.mT @ inside - torch.eye(classes - 1, dtype=torch.float64, device=h.device)
    gap = float((simplex @ missing @ simplex.mT).norm())
    return cosines, sines, gap, span.shape[1]
