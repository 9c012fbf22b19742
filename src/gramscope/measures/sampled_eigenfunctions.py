"""How far eigenfunctions from a sample are from the true ones, and what the curves would be without a QR."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_tensor
from gramscope.base.class_labels import are_labels, class_labels, one_hot_present
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows, check_paired
from gramscope.base.results import TableResult
from gramscope.base.rounding import Rounding, column_basis
from gramscope.measures.linear_learning import sample_modes


@dataclass(frozen=True, eq=False, repr=False)
class NystromErrors(TableResult, shown=("largest_span_error",), columns=("eigenvalues", "eigenvectors", "spans")):
    """Errors by k: of the eigenvalue, of the eigenvector, and of the span of the first k eigenvectors."""

    eigenvalues: Float[Tensor, " p"] = field(repr=False)
    eigenvectors: Float[Tensor, " p"] = field(repr=False)
    spans: Float[Tensor, " p"] = field(repr=False)

    @property
    def largest_span_error(self) -> float:
        return float(self.spans.max())


def nystrom_errors(
    features: Float[Tensor, "n p"], eigenvalues: Float[Tensor, " p"], modes: Float[Tensor, "p p"] | None = None
) -> NystromErrors:
    """Errors of the eigenvalues and eigenvectors of ``ΦᵀΦ/n`` where the true ones are known.

    With s_k², u_k of the sample and ρ_k, o_k true: ``(s_k² - ρ_k)²/ρ_k²`` (67), ``1 - |u_kᵀo_k|`` (68) and
    ``1 - (1/k) Σ_{i,j≤k} (u_iᵀo_j)²`` (74). The expectations of (67) and (68) are means of this over samples.

    Args:
        features: Φ (n, p) of the sample.
        eigenvalues: true ρ (p,), positive and descending.
        modes: true eigenvectors o_k (p, p) as columns; None: the axes.

    Reference: arXiv:2410.04264, appendices J.1 and J.2, eqs. 67, 68 and 74.

    Example:
        >>> phi = torch.tensor([[2.0, 0.0], [0.0, 1.0]]) * 2**0.5
        >>> nystrom_errors(phi, torch.tensor([4.0, 1.0])).largest_span_error < 1e-12
        True
    """
    phi = as_rows(features, "features")
    rho, p = check_tensor(eigenvalues, "eigenvalues").detach().double(), phi.shape[1]
    if rho.shape != (p,) or not bool((rho > 0).all()) or bool((rho.diff() > 0).any()):
        raise InputError(f"eigenvalues must be {p} positive numbers, the largest first, got {rho.tolist()[:5]}.")
    true = torch.eye(p, dtype=torch.float64, device=rho.device) if modes is None else modes.detach().double()
    if true.shape != (p, p):
        raise InputError(f"modes must have shape ({p}, {p}), an eigenvector in each column, got {tuple(true.shape)}.")
    found, u = torch.linalg.eigh(phi.mT @ phi / len(phi))
    found, overlaps = found.flip(0), (u.flip(1).mT @ true).square()
    shared = overlaps.cumsum(0).cumsum(1).diagonal() / torch.arange(1, p + 1, device=rho.device)
    return NystromErrors(((found - rho) / rho).square(), 1 - overlaps.diagonal().sqrt(), 1 - shared)


@dataclass(frozen=True, eq=False, repr=False)
class PlainProjections(TableResult, shown=("total", "largest_overlap"), columns=("cumulative",)):
    """Cumulative projections by k without a QR, and the overlaps ⟨e_i|e_j⟩ of the eigenfunctions there."""

    cumulative: Float[Tensor, " r"] = field(repr=False)
    overlaps: Float[Tensor, "r r"] = field(repr=False)

    @property
    def total(self) -> float:
        """The last of the cumulative projections; above 1 where the eigenfunctions are far from orthogonal."""
        return float(self.cumulative[-1])

    @property
    def largest_overlap(self) -> float:
        """The largest cosine of two different eigenfunctions."""
        return float((self.overlaps - self.overlaps.diagonal().diag()).abs().max())


def projections_without_qr(
    train_features: Float[Tensor, "n p"], features: Float[Tensor, "m p"], targets: Tensor
) -> PlainProjections:
    """The curve of :func:`richness_curves` if the eigenfunctions were taken for orthogonal.

    ``Π(k) = (1/r) Σ_{j≤k} |Bᵀe_j|²/|e_j|²`` with ``e_j = Φu_j/√ρ_j`` on the evaluation set and B an orthonormal basis
    of the targets there, of rank r. It may exceed 1; the gap to the curve with QR shows how far the eigenfunctions of
    the training set are from orthogonal on other examples.

    Args:
        train_features: Φ (n, p) on training examples.
        features: Φ (m, p) on evaluation examples.
        targets: targets or outputs (m, C), or labels (m,), of the evaluation examples.

    Reference: arXiv:2410.04264, appendix J.3, eqs. 75, 76 and 79, and figure 25.

    Example:
        >>> labels = torch.arange(6) % 2
        >>> projections_without_qr(torch.eye(2)[labels], torch.eye(2)[labels], labels).total
        1.0
    """
    phi, modes = as_rows(features, "features"), sample_modes(train_features)[1]
    if are_labels(check_tensor(targets, "targets")):
        targets = one_hot_present(class_labels(targets))
    y = as_rows(targets, "targets")
    check_paired(phi, y, "features", "targets")
    if len(modes) != phi.shape[1]:
        raise InputError(
            f"training and evaluation features must be rows of one width, got {len(modes)} and {phi.shape[1]}."
        )
    e = phi @ modes
    length = e.norm(dim=0)
    e = torch.where(length > 0, e / length, 0.0)
    basis = column_basis(y, Rounding.of(targets), len(y), y.norm(dim=0))
    if basis.shape[1] == 0:
        raise InputError("targets must not all be zero: they span nothing that could be projected on.")
    return PlainProjections((basis.mT @ e).square().sum(0).cumsum(0) / basis.shape[1], e.mT @ e)
