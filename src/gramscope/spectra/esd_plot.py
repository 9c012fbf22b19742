"""The spectrum of a weight as a picture: density, fitted tail, edge of the noise."""

from typing import Any

import numpy as np
from torch import Tensor

from gramscope.base.charts import axes_or_new
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Axes, Figure, figure_of
from gramscope.spectra.eigenvalues import Eigenvalues, as_eigenvalues, esd
from gramscope.spectra.marchenko_pastur import fit_marchenko_pastur
from gramscope.spectra.tail import Convention, TailFit, fit_tail

BINS = 60


def plot_esd(
    weight: Tensor | np.ndarray | Eigenvalues, *, convention: Convention = "gramscope", axes: Axes | None = None
) -> Figure:
    """The eigenvalue density of ``WᵀW`` on logarithmic axes, with the power law fitted to its tail; a figure.

    ``weight`` is a matrix (rows, cols), or a vector of eigenvalues from :func:`esd` or :func:`esds`. Dashed: the fit
    ``p(λ) ∝ λ^{−α}`` from ``xmin`` on. Dotted: ``xmin``, and for a matrix the edge of the Marchenko-Pastur bulk.

    >>> figure = plot_esd(np.random.default_rng(0).standard_normal((80, 60)))
    >>> [line.get_label().split("=")[0] for line in figure.axes[0].lines][:2]
    ['α ', 'xmin ']
    """
    is_vector = np.ndim(weight) == 1
    if np.ndim(weight) not in (1, 2):
        raise InputError(f"weight must be a matrix or a vector of eigenvalues, got {np.ndim(weight)} axes.")
    values = as_eigenvalues(weight if is_vector else esd(weight), "plot_esd")  # type: ignore[arg-type]
    positive = values[values > 0]
    if not len(positive):
        raise InputError("plot_esd needs a positive eigenvalue, got none. Is the weight zero?")
    fit = fit_tail(values, convention)
    axes = axes_or_new(axes, (5.2, 3.8))
    edges = np.geomspace(max(positive[0], positive[-1] * 1e-6), positive[-1] * (1 + 1e-9), BINS + 1)
    axes.hist(positive, bins=edges.tolist(), density=True, color="#9db8d9")
    axes.set(xscale="log", yscale="log", xlabel="eigenvalue λ", ylabel="density", title=f"{len(values)} eigenvalues")
    _draw_fit(axes, fit, positive)
    if not is_vector:
        edge = fit_marchenko_pastur(values, (int(np.shape(weight)[0]), int(np.shape(weight)[1]))).edges[1]
        axes.axvline(edge, color="#157f5b", linestyle="-.", linewidth=1, label=f"edge of the noise = {edge:.3g}")
    axes.legend(fontsize="small")
    return figure_of(axes)


def _draw_fit(axes: Axes, fit: TailFit, positive: "np.ndarray[Any, np.dtype[np.float64]]") -> None:
    if fit.reason:
        axes.text(0.02, 0.02, f"no tail: {fit.reason}", transform=axes.transAxes, fontsize="small")
        return
    x = np.geomspace(fit.xmin, positive[-1], 50)
    share = np.count_nonzero(positive >= fit.xmin) / len(positive)
    density = share * (fit.alpha - 1) / fit.xmin * (x / fit.xmin) ** -fit.alpha
    label = f"α = {fit.alpha:.2f} ± {fit.sigma:.2f} ({fit.n_tail} in the tail)"
    axes.plot(x, density, "--", color="#c2410c", label=label)
    axes.axvline(fit.xmin, color="#c2410c", linestyle=":", linewidth=1, label=f"xmin = {fit.xmin:.3g}")
