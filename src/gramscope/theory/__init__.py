"""Finite-width theory: recursions, criticality, nearly-kernel machines (PDLT chapter 11). Arrays only."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Public names and the file each lives in; resolved on first use.
_NAMES = {
    "Activation": "activations",
    "Comparison": "comparison",
    "CriticalPoint": "criticality",
    "DepthToWidth": "cutoff",
    "FiniteWidthMLP": "finite_width",
    "Flow": "finite_width",
    "Kinked": "activations",
    "Layer": "recursions",
    "Moments": "families",
    "SingleInput": "closed_flows",
    "Susceptibilities": "criticality",
    "critical_point": "criticality",
    "depth_to_width": "cutoff",
    "ensemble": "sampling",
    "equivalent_learning_rates": "criticality",
    "gaussian_moments": "moments",
    "plot_kernel_flow": "plots",
    "plot_strengths": "plots",
    "resolve": "activations",
    "scale_invariant_layer": "closed_flows",
    "strengths": "cutoff",
    "susceptibilities": "criticality",
    "vanishing_kernel_layer": "closed_flows",
    "NearlyKernelRegressor": "nearly_kernel",
    "QuadraticModel": "quadratic",
}

__all__ = [name for name, file in _NAMES.items() if find_spec(f"{__name__}.{file}") is not None]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"gramscope.theory has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
