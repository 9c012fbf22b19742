"""What a linear model on given features learns: learnability, predicted test loss, and each mode over time.

The features Φ of a network have eigenvalues ρ_k and eigenfunctions e_k (``Σ = E[ΦΦᵀ]``). A linear readout on them
learns the modes of large ρ_k first and best, and how well is known in closed form.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gramscope.base.checks import check_count, check_finite, check_number, check_tensor
from gramscope.base.class_labels import target_rows
from gramscope.base.effective_rank import check_eigenvalues
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows, check_paired
from gramscope.base.results import TableResult
from gramscope.measures.eigenfunction_curves import feature_modes
from gramscope.measures.rows import Rows


@dataclass(frozen=True, eq=False, repr=False)
class Learnability(TableResult, shown=("kappa", "n"), columns=("values",)):
    """Learnability L_k of each mode, in the order of the eigenvalues given, and the constant κ that sets them."""

    values: Float[Tensor, " p"] = field(repr=False)
    kappa: float
    n: int


def learnability(eigenvalues: Float[Tensor, " p"], n: int, *, ridge: float = 0.0) -> Learnability:
    """How much of each mode a linear model learns from ``n`` examples: ``L_k = ρ_k/(ρ_k + κ)``, between 0 and 1.

    κ solves ``Σ_k ρ_k/(ρ_k + κ) + δ/κ = n`` with the ridge δ of ``(K + δ)⁻¹``, K the kernel matrix of the n examples.
    The learnabilities sum to n where δ is 0. With as many examples as modes and no ridge, κ is 0 and all is learnt.

    Args:
        eigenvalues: ρ (p,) of ``E[ΦΦᵀ]``, of any order; modes of eigenvalue 0 are never learnt.
        n: number of training examples.
        ridge: δ ≥ 0, added to the kernel matrix ``ΦᵀΦ`` (not divided by n).

    Reference: arXiv:2410.04264, eq. 15; Simon et al. 2023 (arXiv:2110.03922) for the ridge.

    Example:
        >>> found = learnability(torch.tensor([1.0, 1.0, 1.0, 1.0]), 2)
        >>> found.values.round(decimals=9).tolist(), round(found.kappa, 9)
        ([0.5, 0.5, 0.5, 0.5], 1.0)
    """
    rho, n = check_eigenvalues(eigenvalues), check_count(n, "n")
    ridge = check_number(ridge, "ridge", least=0.0)
    kappa = _kappa(rho[rho > 0], n, ridge)
    values = torch.where(rho > 0, rho / (rho + kappa), 0.0)
    return Learnability(values, kappa, n)


def predicted_loss(
    eigenvalues: Float[Tensor, " p"],
    coefficients: Float[Tensor, "p *C"],
    n: int,
    *,
    ridge: float = 0.0,
    noise: float = 0.0,
) -> float:
    """Expected test loss ``E|f̂ - f*|²`` of the linear model after training on ``n`` examples, noise-free at the test.

    ``L_G = (Σ_k (1 - L_k)² |⟨e_k|f*⟩|² + σ²) / (1 - Σ_k L_k²/n) - σ²``, summed over the outputs. The divisor says how
    much the sample varies; it is 0 for as many examples as modes, where noise makes the loss infinite.

    Args:
        eigenvalues: ρ (p,). A part of the target outside all features is a mode of eigenvalue 0.
        coefficients: ``⟨e_k|f*⟩`` (p,), or (p, C) for C outputs.
        n: number of training examples.
        ridge: as in :func:`learnability`.
        noise: standard deviation σ of noise on the training targets, for each output.

    Reference: arXiv:2410.04264, eq. 16 (σ = 0); Simon et al. 2023 (arXiv:2110.03922).

    Example:
        >>> rho, target = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
        >>> round(predicted_loss(rho, target, 2), 9)                          # (1/2)² / (1 - 4 (1/2)²/2)
        0.5
    """
    found = learnability(eigenvalues, n, ridge=ridge)
    power = _coefficients(coefficients, found.values)
    outputs = coefficients[0].numel()
    variance = outputs * check_number(noise, "noise", least=0.0) ** 2
    missed = float(((1 - found.values).square() * power).sum())
    rest = float((found.values * (1 - found.values)).sum()) + n - float(found.values.sum())
    if rest <= 0:  # as many examples as modes: all is learnt, if nothing disturbs it
        return float("inf") if variance + missed > 0 else 0.0
    return (missed + variance) * n / rest - variance


def mode_dynamics(
    eigenvalues: Float[Tensor, " p"],
    coefficients: Float[Tensor, "p *C"],
    t: Float[Tensor, " T"],
    *,
    start: Float[Tensor, "p *C"] | None = None,
) -> Float[Tensor, "T p *C"]:
    """Coefficients ``⟨e_k|f⟩`` of the linear model under gradient flow on endless data, at the times ``t``.

    ``⟨e_k|f⟩(t) = ⟨e_k|f*⟩ + (⟨e_k|f⟩(0) - ⟨e_k|f*⟩) e^{-ρ_k t}``: each mode by itself, large ρ_k first. The loss is
    ``½ E|f - f*|²``.

    Args:
        eigenvalues: ρ (p,).
        coefficients: ``⟨e_k|f*⟩`` (p,) or (p, C).
        t: times (T,), at least 0.
        start: coefficients at time 0; None: the zero function.

    Reference: arXiv:2410.04264, eqs. 17, 22-25.

    Example:
        >>> mode_dynamics(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0]), torch.tensor([0.0, 50.0])).tolist()
        [[0.0, 0.0], [2.0, 0.0]]
    """
    rho = check_eigenvalues(eigenvalues)
    _coefficients(coefficients, rho)
    if check_tensor(t, "t").dim() != 1 or not bool((t >= 0).all()):
        raise InputError(
            f"t must be times (T,), all at least 0, got shape {tuple(t.shape)}. Pass e.g. torch.arange(9.)"
        )
    target = coefficients.detach().double()
    begin = torch.zeros_like(target) if start is None else start.detach().double()
    if begin.shape != target.shape:
        raise InputError(
            f"start must have the shape {tuple(target.shape)} of the coefficients, got {tuple(begin.shape)}."
        )
    check_finite(begin, "start", "Look for a run that has diverged.")
    shape = (len(t), len(rho), *(1,) * (target.dim() - 1))
    grown = -torch.expm1(-torch.outer(t.double(), rho)).reshape(shape)
    return begin + (target - begin) * grown


@dataclass(frozen=True, eq=False, repr=False)
class Eigenmodes(
    TableResult, shown=("constant", "outside", "eigenvalues", "coefficients"), columns=("eigenvalues", "power", "means")
):
    """Eigenvalues ρ (r,), descending, coefficients ⟨e_k|f*⟩ (r, C) and means ⟨1|e_k⟩ (r,) of features on a sample.

    ``outside`` is the part of ``E|f*|²`` that no mode holds. ``constant`` is |⟨1|e₁⟩|: near 1, the first eigenfunction
    is the constant function.
    """

    eigenvalues: Float[Tensor, " r"]
    coefficients: Float[Tensor, "r C"]
    means: Float[Tensor, " r"]
    outside: float

    @property
    def constant(self) -> float:
        return float(self.means[0].abs())

    @property
    def power(self) -> Float[Tensor, " r"]:
        """``|⟨e_k|f*⟩|²``, summed over the outputs."""
        return self.coefficients.square().sum(1)

    def predicted_loss(self, n: int, *, ridge: float = 0.0, noise: float = 0.0) -> float:
        """The test loss of a readout trained on ``n`` examples; what lies outside the features is never learnt."""
        rho = torch.cat([self.eigenvalues, self.eigenvalues.new_zeros(1)])
        lost = self.coefficients.new_zeros(1, self.coefficients.shape[1])
        lost[0, 0] = self.outside**0.5
        return predicted_loss(rho, torch.cat([self.coefficients, lost]), n, ridge=ridge, noise=noise)


def eigenmodes(features: Float[Tensor, "n p"], targets: Shaped[Tensor, "n *C"]) -> Eigenmodes:
    """Eigenvalues of the features, the target in their eigenfunctions, and how constant each eigenfunction is.

    ``Σ = ΦᵀΦ/n = U diag(ρ) Uᵀ``, ``e_k = Φu_k/√ρ_k``, ``⟨e_k|f*⟩ = e_kᵀf*/n``, ``⟨1|e_k⟩`` the mean of e_k. Directions
    that are rounding of the features are left out. Take many more examples than features.

    Reference: arXiv:2410.04264, eqs. 6 and 13-14; appendix D.2 for ⟨1|e₁⟩, above .95 in its experiments.

    Example:
        >>> found = eigenmodes(torch.tensor([[2.0, 1.0], [2.0, -1.0]]), torch.tensor([0.0, 2.0]))
        >>> found.eigenvalues.round(decimals=9).tolist(), round(found.constant, 9), round(found.outside, 9)
        ([4.0, 1.0], 1.0, 0.0)
    """
    phi, f = as_rows(features, "features"), as_rows(target_rows(targets), "targets")
    check_paired(phi, f, "features", "targets")
    rho, modes = sample_modes(features)
    e = phi @ modes / rho.sqrt()
    coefficients = e.mT @ f / len(phi)
    outside = max(float(f.square().sum() / len(f) - coefficients.square().sum()), 0.0)
    return Eigenmodes(rho, coefficients, e.mean(0), outside)


def sample_modes(features: Float[Tensor, "n p"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "p r"]]:
    """Eigenvalues of ``ΦᵀΦ/n``, descending, and their vectors, without those that are rounding of the features."""
    rows = Rows.of(features, "features")
    _, rho, modes = feature_modes(rows, rows.n)
    if len(rho) == 0:
        raise InputError("features must not all be zero: they have no eigenfunction.")
    return rho, modes


def _kappa(rho: Float[Tensor, " p"], n: int, ridge: float) -> float:
    """κ by Brent's method in its logarithm: the left side falls from above n to below it."""
    from scipy.optimize import brentq

    if ridge == 0 and n >= len(rho):
        return 0.0
    low = float(rho.min()) * 1e-20 if len(rho) else 0.0
    low, high = max(low, 0.5 * ridge / n), (float(rho.sum()) + ridge) / n  # Σρ/(ρ+κ) + δ/κ <= (Σρ + δ)/κ
    low = low or high * 1e-20

    def above(logarithm: float) -> float:
        kappa = math.exp(logarithm)
        return float((rho / (rho + kappa)).sum()) + ridge / kappa - n

    return math.exp(brentq(above, math.log(low), math.log(high), xtol=1e-15, rtol=1e-15))


def _coefficients(coefficients: Tensor, rho: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """The squares, summed over the outputs."""
    if (
        check_tensor(coefficients, "coefficients").dim() not in (1, 2)
        or len(coefficients) != len(rho)
        or coefficients.numel() == 0
    ):
        raise InputError(
            f"coefficients must have one row for each of the {len(rho)} eigenvalues, (p,) or (p, C), got shape "
            f"{tuple(coefficients.shape)}."
        )
    check_finite(coefficients, "coefficients", "Look at the targets that they were computed from.")
    return coefficients.detach().double().reshape(len(rho), -1).square().sum(1)
