"""Numbers drawn from the richness curves, and the curves of every layer."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.checks import check_choice
from gramscope.base.effective_rank import effective_rank
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.results import Result
from gramscope.base.user_warnings import undefined
from gramscope.capture.activations import Layers
from gramscope.measures.by_weight import ByLayer
from gramscope.measures.eigenfunction_curves import Curves, richness_curves
from gramscope.measures.layer_features import Reduce, features

Method = Literal["pearson", "spearman"]


def utilisation_dimension(curves: Curves) -> float:
    """How many eigenfunctions the outputs use: ``D_eff(Q̂) = 1 + effective_rank(Q̂(2)..Q̂(r))``.

    ``Q̂(k) = Π̂(k) - Π̂(k-1)`` is the use of the k-th eigenfunction. The first one, near the constant function, counts as
    one. C for a rich network of C classes.

    Reference: arXiv:2410.04264, eq. 9 and table 4.

    Example:
        >>> import torch
        >>> labels = torch.arange(60) % 3
        >>> phi = torch.eye(3)[labels]
        >>> round(utilisation_dimension(richness_curves(phi, phi, outputs=phi)), 6)
        3.0
    """
    used = _increments(curves.utilisation, "utilisation", "outputs")[1:]
    return 1.0 if not bool(used.any()) else 1.0 + effective_rank(used)


@dataclass(frozen=True, repr=False)
class CurveCorrelation(Result):
    """Correlations over eigenfunctions, from the second: None where the curves lack targets or outputs."""

    quality_intensity: float | None
    utilisation_intensity: float | None
    quality_utilisation: float | None


def curve_correlation(curves: Curves, *, method: Method = "spearman") -> CurveCorrelation:
    """Correlation of quality Q*(k), utilisation Q̂(k) and intensity ρ_k over the eigenfunctions k ≥ 2.

    Q*(k) and Q̂(k) are the steps of the cumulative curves. The first eigenfunction, near the constant function, is left
    out. Over training, this is the numerical form of "larger features have higher quality".

    Args:
        curves: of :func:`richness_curves`.
        method: "spearman" (of ranks; intensities span decades) or "pearson".

    Reference: arXiv:2410.04264, section 5.3 and figure 5.

    Example:
        >>> import torch
        >>> labels = torch.arange(64) % 4
        >>> phi = torch.eye(4)[labels] * torch.tensor([4.0, 3.0, 2.0, 1.0])
        >>> targets = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0], [0.0, 0.5]])[labels]
        >>> round(curve_correlation(richness_curves(phi, phi, targets)).quality_intensity, 6)
        1.0
    """
    check_choice(method, "method", get_args(Method))
    rho = curves.eigenvalues[1 : curves.rank]
    quality = None if curves.quality is None else _increments(curves.quality, "quality", "targets")[1:]
    used = None if curves.utilisation is None else _increments(curves.utilisation, "utilisation", "outputs")[1:]
    if quality is None and used is None:
        raise InputError("the curves must have a quality or a utilisation. Give richness_curves targets or outputs.")
    return CurveCorrelation(
        _correlation(quality, rho, method), _correlation(used, rho, method), _correlation(quality, used, method)
    )


def layer_curves(
    model: nn.Module,
    train: ModelInput,
    x: ModelInput,
    targets: Tensor | None = None,
    *,
    layers: Layers = "*",
    reduce: Reduce = "flatten",
) -> ByLayer[Curves]:
    """Richness curves of every chosen layer: the eigenfunctions of its features, the targets and the model's outputs.

    Args:
        model: any module with tensor outputs (n, C); it is left as it was.
        train: inputs that give the eigenfunctions of each layer.
        x: inputs of the evaluation set, more than the layers have features.
        targets: targets (m, C) or labels (m,) of ``x``; None: utilisation alone.
        layers: names or globs.
        reduce: of spatial and token axes; the paper flattens.

    Reference: arXiv:2410.04264, appendix I, eq. 59, figures 18-21.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        >>> found = layer_curves(model, torch.randn(40, 3).double(), torch.randn(30, 3).double(), layers=["0", "1"])
        >>> sorted(found)
        ['0', '1']
    """
    known = features(model, train, layers, reduce=reduce)
    last = features(model, x, [*known, ""], reduce=reduce)
    outputs = last.pop("")
    return ByLayer({name: richness_curves(known[name], phi, targets, outputs) for name, phi in last.items()})


def _increments(cumulative: Float[Tensor, " k"] | None, name: str, source: str) -> Float[Tensor, " k"]:
    """``Q(k) = Π(k) - Π(k-1)``, at least 0."""
    if cumulative is None:
        raise InputError(
            f"the curves must have a {name}. Give richness_curves the {source} of the evaluation examples."
        )
    return cumulative.diff(prepend=cumulative.new_zeros(1)).clamp(min=0)


def _correlation(a: Tensor | None, b: Tensor | None, method: Method) -> float | None:
    from scipy.stats import pearsonr, spearmanr

    if a is None or b is None:
        return None
    if len(a) < 3:
        return undefined("a correlation over eigenfunctions", f"it needs 4 eigenfunctions, got {len(a) + 1}")
    if float(a.std()) == 0 or float(b.std()) == 0:
        return undefined("a correlation over eigenfunctions", "one of the two curves is constant")
    found = spearmanr(a.cpu(), b.cpu()) if method == "spearman" else pearsonr(a.cpu(), b.cpu())
    return float(found.statistic)
