"""When is a function of three inputs a meta kernel? Conditions on a finite set of inputs, and which of them fails.

Features with ``k = φ φᵀ`` and ``μ_{012} = Σ_jk ψ_jk(x₀) φ_j(x₁) φ_k(x₂)``, ψ symmetric, exist on a finite set if and
only if

1. k is symmetric and positive semi-definite;
2. μ is symmetric in its last two inputs;
3. for each x₀ there is a finite c with ``c k ± μ_{x₀..} ⪰ 0``: where k sees no difference between inputs, μ sees none.

Sufficient: with ``k = Q l Qᵀ`` and the features ``φ = Q √l``, ``ψ(x₀) = l^{-½} Qᵀ μ_{x₀..} Q l^{-½}`` on the modes with
l > 0 gives μ back. Necessary: ``|aᵀ μ a| = |(φᵀa)ᵀ ψ (φᵀa)| ≤ |ψ| aᵀ k a``. The least c is the spectral norm of ψ(x₀).
ψ itself need not be positive. For a function on infinitely many inputs the bound c must hold on all finite sets.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from gramscope.base.checks import check_finite, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class MetaKernelConditions(Result):
    """The three conditions, each with the size by which it is missed, relative to the largest entry concerned.

    ``bounds`` (n0,) are the least c of ``c k ± μ ⪰ 0``, infinite where there is none. ``failures`` says in words which
    conditions fail; it is empty where ``holds``.
    """

    kernel_asymmetry: float
    kernel_negativity: float
    asymmetry: float
    outside_range: float
    bounds: Float[np.ndarray, " n0"]
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.failures

    def __repr__(self) -> str:
        if self.holds:
            return f"MetaKernelConditions(hold, |ψ| up to {self.bounds.max():.3g})"
        return f"MetaKernelConditions(fail: {'; '.join(self.failures)})"


def meta_kernel_conditions(kernel: Array, meta: Array, *, tol: float = 1e-9) -> MetaKernelConditions:
    """Whether ``meta`` (n0, n, n) is a meta kernel for ``kernel`` (n, n) on these inputs, and if not, why.

    ``meta[d, a, b] = μ(x_d; x_a, x_b)``, ``kernel[a, b] = k(x_a, x_b)``. Conditions are taken as met up to ``tol`` of
    the largest entry; modes of the kernel below ``tol`` of its largest eigenvalue count as null.

    Reference: PDLT (arXiv:2106.10165) equation (11.126) and footnote 22, which asks for meta kernels that are written
    down without features; the conditions are not in the text.

    Example:
        >>> import numpy as np
        >>> from gramscope.theory.meta_kernel_validity import meta_kernel_conditions
        >>> k = np.array([[1.0, 0.5], [0.5, 1.0]])
        >>> meta_kernel_conditions(k, k[:, :, None] * k[:, None, :]).holds            # k_01 k_02
        True
        >>> meta_kernel_conditions(k, np.broadcast_to(k[:, :, None], (2, 2, 2))).failures[0]   # k_01: x2 plays no part
        'μ must be symmetric in its last two inputs, but differs by 0.5 of its largest entry'
    """
    tol = check_number(tol, "tol", above=0.0)
    k, mu = _checked(kernel, "kernel", 2), _checked(meta, "meta", 3)
    if k.shape[0] != k.shape[1] or mu.shape[1:] != k.shape:
        raise InputError(
            f"kernel must have shape (n, n) and meta (n0, n, n) with the same n, got {k.shape} and {mu.shape}."
        )
    kernel_gap = _relative(k - k.T, k)
    values, vectors = np.linalg.eigh((k + k.T) / 2)
    largest = max(float(np.abs(values).max()), np.finfo(np.float64).tiny)
    negativity = max(0.0, -float(values[0])) / largest
    gap = _relative(mu - mu.transpose(0, 2, 1), mu)
    turned = vectors.T @ ((mu + mu.transpose(0, 2, 1)) / 2) @ vectors
    seen = values > tol * largest
    outside = turned.copy()
    outside[np.ix_(np.arange(len(mu)), seen, seen)] = 0.0
    missed = np.abs(outside).max(axis=(1, 2)) / max(float(np.abs(mu).max()), np.finfo(np.float64).tiny)
    roots = np.sqrt(values[seen])
    psi = turned[np.ix_(np.arange(len(mu)), seen, seen)] / np.outer(roots, roots)
    norms = np.abs(np.linalg.eigvalsh(psi)).max(axis=1, initial=0.0)
    bounds = np.where(missed > np.sqrt(tol), np.inf, norms)
    failures = _failures(tol, kernel_gap, negativity, gap, float(missed.max()))
    return MetaKernelConditions(kernel_gap, negativity, gap, float(missed.max()), bounds, failures)


def _failures(tol: float, kernel_gap: float, negativity: float, gap: float, missed: float) -> tuple[str, ...]:
    found = []
    if kernel_gap > tol:
        found.append(f"k must be symmetric, but differs from its transpose by {kernel_gap:.3g} of its largest entry")
    if negativity > tol:
        found.append(f"k must be positive semi-definite, but has an eigenvalue of -{negativity:.3g} of its largest")
    if gap > tol:
        found.append(f"μ must be symmetric in its last two inputs, but differs by {gap:.3g} of its largest entry")
    # Rounding of a null mode of k enters through its square root.
    if missed > np.sqrt(tol):
        found.append(
            f"c k ± μ must be positive semi-definite for some c, but μ has entries of {missed:.3g} of its largest "
            "where k is zero"
        )
    return tuple(found)


def _relative(difference: Array, whole: Array) -> float:
    size = float(np.abs(whole).max())
    return float(np.abs(difference).max()) / size if size > 0 else 0.0


def _checked(given: object, name: str, axes: int) -> Array:
    found = np.asarray(given, dtype=np.float64)
    if found.ndim != axes or found.size == 0:
        raise InputError(f"{name} must have {axes} axes and at least one entry, got shape {found.shape}.")
    check_finite(found, name, "Check how it was computed.")
    return found
