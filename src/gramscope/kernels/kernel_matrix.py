"""A kernel with what people do with it: spectrum, alignment, regression, shares of the layers, pictures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from gramscope.base.agreement import cosine
from gramscope.base.charts import heat_map, line_chart
from gramscope.base.checks import check_finite, check_number
from gramscope.base.class_labels import target_rows
from gramscope.base.effective_rank import participation_ratio_of
from gramscope.base.errors import InputError
from gramscope.base.moments import centered_rows
from gramscope.base.nested import ModelInput
from gramscope.base.pyplot import Axes, Figure, load_pyplot
from gramscope.base.results import TableResult
from gramscope.base.rounding import EPS64, Rounding, singular_floor
from gramscope.base.shares import shares
from gramscope.base.user_warnings import undefined
from gramscope.kernels.empirical_ntk import NTKOptions, Reduce, ntk


@dataclass(frozen=True, eq=False)
class Kernel(TableResult):
    """A tangent kernel: ``total`` (n, C, m, C) or, traced over outputs, (n, m); ``sites`` the same by parameter."""

    total: Tensor = field(repr=False)
    sites: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def matrix(self) -> Float[Tensor, "rows cols"]:
        """The kernel as a matrix; rows run over examples, then outputs."""
        return _matrix(self.total)

    @property
    def examples(self) -> int:
        return self.total.shape[0]

    @property
    def outputs(self) -> int:
        """Outputs that are still open: 1 for a kernel traced over them."""
        return 1 if self.total.dim() == 2 else self.total.shape[1]

    def spectrum(self) -> Float[Tensor, " rows"]:
        """Eigenvalues in float64, largest first."""
        return torch.linalg.eigvalsh(self._square().double()).flip(0)

    def participation_ratio(self) -> float:
        """``tr(K)² / tr(K²)``: how many directions the kernel spreads over, between 1 and its size.

        NaN, with a warning, for a kernel that is zero.
        """
        return participation_ratio_of(self._square(), "the kernel")

    def alignment(self, other: "Kernel | Tensor") -> float:
        """``⟨K, L⟩ / (|K| |L|)`` with another kernel of the same shape; NaN, with a warning, where one is zero."""
        a = self.matrix.double()
        b = _matrix(other.total if isinstance(other, Kernel) else other).double()
        if a.shape != b.shape:
            raise InputError(f"the other kernel must have shape {tuple(a.shape)} as a matrix, got {tuple(b.shape)}.")
        return cosine(a, b, "an alignment", f"the {'kernel' if not bool(a.any()) else 'other kernel'} is zero")

    def target_alignment(self, targets: Tensor) -> float:
        """Uncentred alignment ``⟨K, y yᵀ⟩ / (|K| |y yᵀ|)``, only the targets centred over the examples.

        Labels (n,) count as one-hot. ``gs.measures.kernel_target_alignment`` centres the kernel too: the numerator is
        the same, but a part of the kernel that all examples share enlarges |K| here alone.

        NaN, with a warning, where the targets are the same for all examples.
        """
        given = target_matrix(targets, self.examples)
        y = centered_rows(given)
        if self.total.dim() == 4 and y.shape[1] != self.outputs:
            raise InputError(f"targets must have {self.outputs} columns, one for each output, got {y.shape[1]}.")
        # Rounding of the mean must not pass for a difference.
        if float(y.abs().max()) <= 1e-14 * float(given.abs().max()):
            return undefined("a target alignment", "the targets are the same for all examples")
        if self.total.dim() == 2:
            return self.alignment(y @ y.T)
        return self.alignment(torch.outer(y.flatten(), y.flatten()))

    def predict(
        self,
        cross: "Kernel | Tensor",
        targets: Float[Tensor, "n C"],
        ridge: float = 0.0,
        *,
        t: float | Float[Tensor, " times"] | None = None,
    ) -> Float[Tensor, "*times m C"]:
        """Kernel regression ``K_* (K + ridge·1)^-1 y``, or gradient flow ``K_* K^-1 (1 − e^{−K t}) y`` at time t.

        ``cross`` is the kernel between new examples (rows) and these (columns); pass the kernel itself for the
        training examples. For the linearised network, pass ``y - f₀`` as targets and add the initial outputs of the
        new examples.

        ``t`` is learning rate times steps of gradient descent on ``½ Σ (f − y)²``, in the limit of small steps; for the
        mean squared error ``mse`` over n examples and C outputs, multiply it by ``2/(n C)``. Several times (T,) give
        (T, m, C). With ``ridge`` the flow is that of K + ridge: weight decay towards the initial parameters. Lee et al.
        2019 (arXiv:1902.06720), eq. 10 and 11.
        """
        check_number(ridge, "ridge", least=0.0)
        new = _matrix(cross.total if isinstance(cross, Kernel) else cross).double()
        matrix = self._square().double()
        if targets.dim() == 0 or len(targets) != self.examples:
            raise InputError(
                f"targets must have one row for each of the kernel's {self.examples} examples, got shape "
                f"{tuple(targets.shape)}."
            )
        check_finite(targets, "targets", "Clean the data first.")
        check_finite(new, "the cross kernel", "Look at the step where training diverged.")
        y = targets.double().reshape(self.examples, -1)
        stacked = y if self.total.dim() == 2 else y.reshape(-1, 1)
        if stacked.shape[0] != matrix.shape[0] or new.shape[1] != matrix.shape[0]:
            raise InputError(
                f"targets and cross kernel must match the kernel's {matrix.shape[0]} rows, got {stacked.shape[0]} "
                f"targets and a cross kernel of shape {tuple(new.shape)} (new examples in rows)."
            )
        shifted = matrix + ridge * torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
        if t is None and ridge > 0:
            return (new @ torch.linalg.solve(shifted, stacked)).reshape(-1, y.shape[1])
        times = _times(math.inf if t is None else t, matrix.device)
        # What is divided by eigenvalues that are rounding, of the kernel or of their own computation, is rounding.
        floor = float(singular_floor(matrix, Rounding.of(self._square())))
        floor = max(floor, len(matrix) * EPS64 * float(matrix.norm()))
        weights = flow_weights(shifted, stacked, times.reshape(-1), floor)
        return (new @ weights).reshape(*times.shape, -1, y.shape[1])

    def share(self, residual: Float[Tensor, "n C"]) -> dict[str, float]:
        """Share of each parameter in the first-order decrease of the loss, ``eᵀ K_site e / eᵀ K e``.

        ``residual`` is ∂loss/∂f, one entry for each example and output (prediction minus target for the squared error).
        """
        if self.total.dim() == 2:
            raise InputError('shares need the full kernel, but this one is traced over outputs. Use reduce="none".')
        if not self.sites:
            raise InputError("shares need the kernel by site, but this one was made without. Use by_site=True.")
        check_finite(residual, "residual", "Is there a NaN in the targets?")
        e = residual.double().reshape(-1).to(self.total.device)
        if len(e) != len(self.matrix):
            raise InputError(f"residual must have {len(self.matrix)} entries (examples x outputs), got {len(e)}.")
        each = {name: float(e @ (_matrix(site).double() @ e)) for name, site in self.sites.items()}
        return shares(each, why="the loss does not change to first order: is the residual zero?")

    def plot(self, order: Int[Tensor, " n"] | None = None, *, axes: Axes | None = None) -> Figure:
        """The kernel between examples (traced over outputs) as a picture; ``order`` sorts them, by class say."""
        image = self.total if self.total.dim() == 2 else torch.einsum("ncmc->nm", self.total)
        if order is not None:
            image = image[order][:, order]
        return heat_map(image, "Tangent kernel", "example", "example", axes=axes)

    def plot_spectrum(self) -> Figure:
        """Eigenvalues on logarithmic axes."""
        kept = self.spectrum()
        kept = kept[kept > 0]
        title = f"Participation ratio {self.participation_ratio():.1f}"
        rank, log = range(1, len(kept) + 1), "log"
        return line_chart(rank, {"": kept}, title, "rank", xscale=log, yscale=log, ylabel="eigenvalue")

    def plot_shares(self, residual: Float[Tensor, "n C"]) -> Figure:
        """Which parameter does the learning, as bars."""
        pyplot = load_pyplot()
        shares = self.share(residual)
        figure, axes = pyplot.subplots(figsize=(6, 0.6 + 0.28 * len(shares)), layout="constrained")
        axes.barh(list(shares), [100 * value for value in shares.values()])
        axes.invert_yaxis()
        axes.set(title="Share in the next decrease of the loss", xlabel="%")
        return figure

    def __repr__(self) -> str:
        if self.matrix.shape[0] != self.matrix.shape[1]:
            return str(self)
        return f"{self}, trace {float(self.matrix.double().trace()):.4g}"

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.total.shape))
        return f"Kernel {shape}, {len(self.sites)} sites"

    def _table(self) -> tuple[dict[str, list[float]], list[str]]:
        """Each parameter's part of the trace, its part of the mean squared gradient; none between two sets."""
        square = self.matrix.shape[0] == self.matrix.shape[1]
        traces = {name: float(_matrix(site).double().trace()) for name, site in self.sites.items() if square}
        parts = shares(traces) if traces else {}
        return {"trace": list(traces.values()), "share of the trace": list(parts.values())}, list(traces)

    def _square(self) -> Float[Tensor, "rows rows"]:
        matrix = self.matrix
        if matrix.shape[0] != matrix.shape[1]:
            raise InputError(f"this needs a kernel of examples with themselves, got shape {tuple(matrix.shape)}.")
        check_finite(matrix, "the kernel", "Look at the step where training diverged.")
        return matrix


def kernel(
    model: nn.Module,
    x: ModelInput,
    x2: ModelInput = None,
    reduce: Reduce = "none",
    by_site: bool = True,
    **options: Unpack[NTKOptions],
) -> Kernel:
    """The tangent kernel as a :class:`Kernel`; arguments as for :func:`gramscope.ntk`.

    With ``by_site=False`` only the total is kept, at a memory of one kernel instead of one for each parameter.

    Example:
        >>> import torch, gramscope as gs
        >>> k = gs.kernel(torch.nn.Linear(3, 1, bias=False), torch.eye(3))
        >>> k.participation_ratio()
        3.0
        >>> k.share(torch.ones(3, 1))
        {'weight': 1.0}
    """
    if not by_site:
        return Kernel(ntk(model, x, x2, reduce, **options))
    sites = ntk(model, x, x2, reduce, by_site=True, **options)
    total = torch.zeros_like(next(iter(sites.values())))
    for site in sites.values():
        total += site
    return Kernel(total, sites)


def flow_weights(
    matrix: Float64[Tensor, "rows rows"],
    targets: Float64[Tensor, "rows columns"],
    times: Float64[Tensor, " times"],
    floor: float,
) -> Float64[Tensor, "times rows columns"]:
    """``a_t = g_t(K) y`` with ``g_t(λ) = (1 − e^{−λ t}) / λ``: the coefficients of kernel gradient flow at time t.

    ``f_t = K_* a_t`` solves ``∂_t f = −K (f − y)`` from 0. ``g_t(0) = t``, and ``g_∞ = 1/λ``, zero for eigenvalues up
    to ``floor``, which are rounding. Lee et al. 2019 (arXiv:1902.06720), eq. 8 to 10.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> [round(float(a), 4) for a in flow_weights(one, one, torch.tensor([0.0, 1.0, torch.inf]).double(), 0.0)]
    [0.0, 0.6321, 1.0]
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values.abs() > floor
    safe = torch.where(kept, values, 1.0)
    # Where λ is rounding, λ t counts as zero: g is t, and the direction does not move in the limit.
    moving = torch.where(torch.isinf(times)[:, None], 0.0, times[:, None].expand(-1, len(values)))
    gains = torch.where(kept, -torch.expm1(-times[:, None] * safe) / safe, moving)
    return torch.einsum("ri,ti,si,sc->trc", vectors, gains, vectors, targets)


def _times(t: float | Tensor, device: torch.device) -> Tensor:
    times = torch.as_tensor(t, dtype=torch.float64, device=device)
    if times.dim() > 1 or not bool((times >= 0).all()):
        raise InputError(f"t must be a time of at least 0, or a vector of times, got {t!r}.")
    return times


def _matrix(tensor: Tensor) -> Float[Tensor, "rows cols"]:
    return tensor.flatten(2).flatten(0, 1) if tensor.dim() == 4 else tensor


def target_matrix(targets: Tensor, n: int) -> Float[Tensor, "n C"]:
    """One float64 row for each example; labels as one-hot."""
    if targets.dim() == 0 or len(targets) != n:
        raise InputError(f"targets must have one row for each of the {n} examples, got shape {tuple(targets.shape)}.")
    check_finite(targets, "targets", "Clean the data first.")
    return target_rows(targets).double().reshape(n, -1)
