"""Centred kernel alignment with a kernel of one's choice, a Gaussian one by default."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.agreement import cosine
from gramscope.base.checks import check_number, shape_or_type
from gramscope.base.errors import InputError
from gramscope.base.moments import centered_kernel, centered_rows
from gramscope.base.rounding import EPS64
from gramscope.base.streams import streams_put_back
from gramscope.base.user_warnings import undefined
from gramscope.measures.measure import Measure
from gramscope.measures.rows import PairedRows, Rows

KernelFunction = Callable[[Float[Tensor, "n p"]], Float[Tensor, "n n"]]


class KernelCKA(Measure[PairedRows, float]):
    """CKA of Gaussian kernels ``exp(-|x - x'|²/(2σ²))``, or of any kernel, batch by batch; rows are kept.

    σ is ``bandwidth``, or ``scale`` times the median distance between different examples, for each side by itself.

    >>> import gramscope as gs
    >>> a = torch.randn(30, 4)
    >>> measure = gs.measures.KernelCKA()
    >>> first, second = (measure.update(batch, 2 * batch) for batch in (a[:15], a[15:]))
    >>> round(measure.compute(measure.merge(first, second)), 6)      # the bandwidth follows the scale
    1.0

    Reference: Kornblith et al. 2019 (arXiv:1905.00414), section 3 (RBF kernels with a fraction of the median distance).
    """

    def __init__(
        self,
        kernel: Literal["rbf"] | KernelFunction = "rbf",
        *,
        scale: float = 1.0,
        bandwidth: float | None = None,
        debiased: bool = False,
    ) -> None:
        if not callable(kernel) and kernel != "rbf":
            raise InputError(f'kernel must be "rbf" or a function of rows (n, p) to (n, n), got {kernel!r}.')
        check_number(scale, "scale", above=0.0)
        if bandwidth is not None:
            check_number(bandwidth, "bandwidth", above=0.0)
        self.kernel, self.scale, self.bandwidth, self.debiased = kernel, scale, bandwidth, debiased

    def update(self, a: Tensor, b: Tensor) -> PairedRows:
        return PairedRows.of(a=a, b=b)

    def compute(self, state: PairedRows) -> float:
        least = 4 if self.debiased else 2
        if state.n < least:
            return undefined("kernel CKA", f"it needs at least {least} examples, got {state.n}")
        a, b = (self._gram(rows, side) for side, rows in state.kinds.items())
        return centred_alignment(a, b.to(a.device), debiased=self.debiased)

    def _gram(self, rows: Rows, what: str) -> Float[Tensor, "n n"]:
        x = rows.all()
        if float(centered_rows(x).norm()) <= rows.rounding.relative * float(x.norm()):
            x = x[:1].expand_as(x)  # the same features for all examples, up to rounding
        if callable(self.kernel):
            with streams_put_back():
                k = self.kernel(x)
            if not isinstance(k, Tensor) or tuple(k.shape) != (len(x), len(x)):
                raise InputError(
                    f"kernel must return a matrix ({len(x)}, {len(x)}) for {what}, got {shape_or_type(k)}."
                )
            return k.double()
        squares = squared_distances(x)
        sigma = self.scale * _median_distance(squares) if self.bandwidth is None else self.bandwidth
        # Half the examples (or all) at one point: a Gaussian of width 0 tells only equal from unequal.
        if sigma == 0:
            return (squares == 0).double()
        return torch.exp(squares / sigma / sigma / -2)


def kernel_cka(
    a: Tensor,
    b: Tensor,
    kernel: Literal["rbf"] | KernelFunction = "rbf",
    *,
    scale: float = 1.0,
    bandwidth: float | None = None,
    debiased: bool = False,
) -> float:
    """CKA of two sets of features through a Gaussian kernel (or any other), which sees neighbourhoods.

    ``CKA = HSIC(K, L)/√(HSIC(K, K) HSIC(L, L))``, ``K_ij = exp(-|x_i - x_j|²/(2σ²))``, σ = scale · median distance.

    Args:
        a: features (n, ...).
        b: features (n, ...) of the same examples.
        kernel: "rbf", or a function of rows (n, p) that returns the Gram matrix (n, n).
        scale: σ over the median distance between examples.
        bandwidth: σ itself, in place of ``scale``.
        debiased: use HSIC₁.

    Reference: Kornblith et al. 2019 (arXiv:1905.00414), section 3.

    Example:
        >>> x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
        >>> round(kernel_cka(x, 5 * x), 12)       # the median makes it independent of scale
        1.0
    """
    return KernelCKA(kernel, scale=scale, bandwidth=bandwidth, debiased=debiased)(a, b)


def centred_alignment(a: Float[Tensor, "n n"], b: Float[Tensor, "n n"], *, debiased: bool) -> float:
    """``⟨A, B⟩/(|A| |B|)`` of centred kernels; ``debiased`` centres off the diagonal (HSIC₁)."""
    rounding = 1e3 * EPS64
    floors = rounding * a.norm(), rounding * b.norm()
    a, b = ((_u_centred if debiased else centered_kernel)(kernel) for kernel in (a, b))
    for name, kernel, floor in zip("ab", (a, b), floors, strict=True):
        if bool(kernel.norm() <= floor):
            return undefined("CKA", f"the kernel of {name} is constant, so nothing is left once centred")
    return cosine(a, b, "CKA")


def squared_distances(x: Float[Tensor, "n p"]) -> Float[Tensor, "n n"]:
    """|x_i - x_j|², centred first so that a large mean costs no digits; exactly 0 on the diagonal."""
    x = centered_rows(x)
    squares = x.square().sum(1)
    distances = (squares[:, None] + squares[None] - 2 * (x @ x.mT)).clamp(min=0)
    # Equal rows come out as rounding of |x|², which is zero beside it.
    floor = 64 * EPS64 * (squares[:, None] + squares[None])
    distances = torch.where(distances <= floor, 0.0, distances)
    return distances.fill_diagonal_(0.0)


def _median_distance(squares: Float[Tensor, "n n"]) -> float:
    """The middle distance over pairs, or the mean of the two in the middle; torch's median takes the lower of them."""
    above = torch.ones_like(squares, dtype=torch.bool).triu(1)
    return float(np.median(squares[above].sqrt().cpu()))


def _u_centred(k: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Székely & Rizzo's U-centring: ⟨Ũ(K), Ũ(L)⟩ = n(n-3) HSIC₁."""
    n = len(k)
    k = k - torch.diag(k.diagonal())
    rows = k.sum(1) / (n - 2)
    u = k - rows[:, None] - rows[None] + k.sum() / ((n - 1) * (n - 2))
    return u.fill_diagonal_(0.0)
