"""The trace of a tangent kernel over very many outputs, estimated from a few random mixtures of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.charts import heat_map
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.pyplot import Axes, Figure
from gramscope.base.results import Result
from gramscope.capture.network import Outputs, count_examples
from gramscope.capture.projection import Projection, project
from gramscope.kernels.empirical_ntk import PassOptions, ntk
from gramscope.linalg.intervals import half_widths

# Multiplications of a full kernel of the k mixtures, below which it is faster than k kernels of one mixture each.
SMALL_WORK = 2**32


@dataclass(frozen=True, eq=False, repr=False)
class ProjectedTrace(Result, shown=("kernel", "relative_error", "k")):
    """An estimate of ``Σ_c K_{μc,νc}``: ``kernel`` (n, m), and the standard error of each entry.

    ``standard_error`` is itself estimated from k samples and no less than rounding; from few samples use
    :meth:`interval`. The errors of the entries are not independent: all entries share the k mixtures.
    """

    kernel: Float[Tensor, "n m"] = field(repr=False)
    standard_error: Float[Tensor, "n m"] = field(repr=False)
    k: int
    seed: int

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"]]:
        """For each entry, from where to where it lies with probability ``level`` or more."""
        half = half_widths(level, self.k) * self.standard_error
        return self.kernel - half, self.kernel + half

    @property
    def relative_error(self) -> float:
        """``|standard error| / |kernel|``, over all entries."""
        size = float(self.kernel.double().norm())
        return float(self.standard_error.double().norm()) / size if size else 0.0

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The kernel between examples as a heat map; a figure."""
        return heat_map(self.kernel, f"Tangent kernel ({self.k} mixtures)", "example", "example", axes=axes)


def projected_trace(
    model: nn.Module,
    x: ModelInput,
    x2: ModelInput = None,
    *,
    k: int = 16,
    seed: int = 0,
    outputs: Outputs = None,
    **options: Unpack[PassOptions],
) -> ProjectedTrace:
    """``gs.ntk(model, x, reduce="trace")`` for very many outputs: k backward passes, with standard errors.

    Each of the k mixtures ``f s_j`` of :func:`gramscope.project` (s_j random signs) gives an independent and unbiased
    estimate ``t_j = Σ_cd s_cj s_dj K_{μc,νd}`` of the trace. The result is their mean, and their standard deviation
    over √k as its standard error.

    Args:
        model, x, x2: as for :func:`gramscope.ntk`.
        k: number of mixtures, at least 2. The standard error falls as 1/√k.
        seed: of the random signs.
        outputs: which outputs to sum over, all if None.
        options: ``memory``, ``precision``, ``frozen``, ``coupled`` of :func:`gramscope.ntk`.

    Example:
        >>> import torch, gramscope as gs
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 500))
        >>> x = torch.randn(3, 4)
        >>> found = gs.kernels.projected_trace(model, x, k=16)
        >>> low, high = found.interval()
        >>> exact = gs.ntk(model, x, reduce="trace")
        >>> bool(((low < exact) & (exact < high)).all())
        True
    """
    projection = project(k, seed, of=outputs)
    if projection.k < 2:
        raise InputError(f"k must be at least 2, since one sample has no standard error, got {k}. Pass e.g. k=16.")
    wrong = sorted(set(options) & {"reduce", "by_site"})
    if wrong:
        raise InputError(
            f"projected_trace must be called without {wrong[0]}, since it gives the trace of the whole kernel. Use "
            f"gs.ntk(model, x, outputs=gs.project({k}), ...) for other kernels of the mixtures."
        )
    return mean_and_error(_samples(model, x, x2, projection, options), projection)


def _samples(
    model: nn.Module, x: ModelInput, x2: ModelInput, projection: Projection, options: PassOptions
) -> Iterator[Float[Tensor, "n m"]]:
    """The k estimates: from one kernel of all mixtures where it is small, else from one kernel each.

    The kernel of all needs one forward pass, but k² products of gradients where k are of use.
    """
    k, n, m = projection.k, count_examples(x), count_examples(x if x2 is None else x2)
    if n * m * k**2 * sum(parameter.numel() for parameter in model.parameters()) <= SMALL_WORK:
        yield from k * torch.einsum("njmj->jnm", ntk(model, x, x2, outputs=projection, **options))
        return
    for j in range(k):
        one = lambda model, x, j=j: projection(model, x)[:, j : j + 1]  # noqa: E731
        yield k * ntk(model, x, x2, reduce="trace", outputs=one, **options)


def mean_and_error(samples: Iterator[Float[Tensor, "n m"]], projection: Projection) -> ProjectedTrace:
    """Mean and spread in one pass (Welford 1962), in float64: E[t²] − E[t]² would cancel."""
    first = next(samples)
    mean = first.double()
    spread = torch.zeros_like(mean)
    for count, sample in enumerate(samples, start=2):
        offset = sample.double() - mean
        mean += offset / count
        spread += offset**2 * ((count - 1) / count)
    k = projection.k
    sampled = (spread / (k - 1) / k).sqrt()
    rounding = torch.finfo(first.dtype).eps * (spread / k + mean**2).sqrt()
    error = torch.maximum(sampled, rounding)
    return ProjectedTrace(mean.to(first.dtype), error.to(first.dtype), k, projection.seed)
