"""Pictures of the renormalisation-group flow: the kernel from layer to layer, and the growth of the 1/n tensors."""

from collections.abc import Sequence

import torch

from gramscope.base.charts import axes_or_new
from gramscope.base.pyplot import Axes
from gramscope.theory.criticality import ActivationLike, critical_point
from gramscope.theory.cutoff import strengths
from gramscope.theory.finite_width import FiniteWidthMLP, Flow


def plot_kernel_flow(
    activation: ActivationLike,
    *,
    depth: int = 40,
    starts: Sequence[float] = (0.3, 1.0, 3.0),
    detune: Sequence[float] = (0.8, 1.0, 1.2),
    axes: Axes | None = None,
) -> Axes:
    """K^(l) of one input over depth, at the critical C_W and at C_W off by the factors ``detune``; returns the axes."""
    axes = axes_or_new(axes, (5.0, 3.4))
    point = critical_point(activation)
    for place, factor in enumerate(detune):
        for start in starts:
            # One input with x·x/n_0 = G gives K¹ = C_b + C_W G; G is chosen so that all factors start alike.
            C_W = factor * point.C_W
            gram = torch.tensor([[max(start - point.C_b, 0.0) / C_W]], dtype=torch.float64, device="cpu")
            mlp = FiniteWidthMLP(1, activation, C_b=point.C_b, C_W=C_W, depth=depth)
            K = [float(layer.K) for layer in mlp.flow_from_gram(gram, tol=1e-6)]
            label = (f"{factor:g} × critical" if factor != 1 else "critical") if start == starts[0] else None
            axes.plot(range(1, depth + 1), K, color=f"C{place}", label=label, lw=1.4)
    axes.set(xlabel="layer l", ylabel="kernel K", yscale="log", title=f"{point.activation}: C_W = {point.C_W:.4g}")
    axes.minorticks_off()
    axes.legend(fontsize="small")
    return axes


def plot_strengths(flow: Flow, *, axes: Axes | None = None) -> Axes:
    """V/(nK²), F/(nKΘ), B/(nΘ²), P/(nΘ²), Q/(nΘ²) over depth: straight lines of slope ∝ 1/n at criticality.

    >>> import torch, gramscope as gs
    >>> flow = gs.theory.FiniteWidthMLP([2, 50, 50, 50, 1], "relu").flow(torch.ones(1, 2).double())
    >>> plot_strengths(flow).get_xlabel()
    'layer l'
    """
    axes = axes_or_new(axes, (5.0, 3.4))
    units = {"V": "nK²", "F": "nKΘ", "B": "nΘ²", "P": "nΘ²", "Q": "nΘ²"}
    found = strengths(flow)
    for name, unit in units.items():
        axes.plot(range(2, len(flow) + 1), found[name].tolist(), label=f"{name}/({unit})", lw=1.4)
    axes.axhline(0, color="0.8", lw=0.8, zorder=0)
    axes.set(xlabel="layer l", ylabel="strength", title=f"{flow.mlp.activation.name}, n = {flow.fan_in(len(flow))}")
    axes.legend(fontsize="small")
    return axes
