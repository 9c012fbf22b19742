"""Finite-width theory: recursions, criticality, nearly-kernel machines (PDLT chapter 11). Arrays only."""

from gramscope.base.lazy import lazy_names

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
    "algorithm_matrices": "nearly_kernel",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
