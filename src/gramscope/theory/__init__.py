"""Finite-width theory: recursions, criticality, nearly-kernel machines (PDLT chapter 11). Arrays only."""

from typing import TYPE_CHECKING

from gramscope.base.lazy import lazy_names

if TYPE_CHECKING:
    from gramscope.theory.activation_functions import Activation as Activation
    from gramscope.theory.activation_functions import Kinked as Kinked
    from gramscope.theory.activation_functions import resolve as resolve
    from gramscope.theory.closed_flows import SingleInput as SingleInput
    from gramscope.theory.closed_flows import scale_invariant_layer as scale_invariant_layer
    from gramscope.theory.closed_flows import vanishing_kernel_layer as vanishing_kernel_layer
    from gramscope.theory.comparison import Comparison as Comparison
    from gramscope.theory.criticality import CriticalPoint as CriticalPoint
    from gramscope.theory.criticality import Susceptibilities as Susceptibilities
    from gramscope.theory.criticality import critical_point as critical_point
    from gramscope.theory.criticality import equivalent_learning_rates as equivalent_learning_rates
    from gramscope.theory.criticality import susceptibilities as susceptibilities
    from gramscope.theory.cutoff import DepthToWidth as DepthToWidth
    from gramscope.theory.cutoff import depth_to_width as depth_to_width
    from gramscope.theory.cutoff import strengths as strengths
    from gramscope.theory.families import GaussianMoments as GaussianMoments
    from gramscope.theory.finite_width import FiniteWidthMLP as FiniteWidthMLP
    from gramscope.theory.finite_width import Flow as Flow
    from gramscope.theory.gaussian_expectations import gaussian_moments as gaussian_moments
    from gramscope.theory.infinite_width import InfiniteWidthKernels as InfiniteWidthKernels
    from gramscope.theory.nearly_kernel import NearlyKernelRegressor as NearlyKernelRegressor
    from gramscope.theory.nearly_kernel import algorithm_matrices as algorithm_matrices
    from gramscope.theory.plots import plot_kernel_flow as plot_kernel_flow
    from gramscope.theory.plots import plot_strengths as plot_strengths
    from gramscope.theory.quadratic import QuadraticModel as QuadraticModel
    from gramscope.theory.recursions import Layer as Layer
    from gramscope.theory.sampling import ensemble as ensemble


# Public names and the file each lives in; resolved on first use.
_NAMES = {
    "Activation": "activation_functions",
    "Comparison": "comparison",
    "CriticalPoint": "criticality",
    "DepthToWidth": "cutoff",
    "FiniteWidthMLP": "finite_width",
    "Flow": "finite_width",
    "Kinked": "activation_functions",
    "InfiniteWidthKernels": "infinite_width",
    "Layer": "recursions",
    "GaussianMoments": "families",
    "SingleInput": "closed_flows",
    "Susceptibilities": "criticality",
    "critical_point": "criticality",
    "depth_to_width": "cutoff",
    "ensemble": "sampling",
    "equivalent_learning_rates": "criticality",
    "gaussian_moments": "gaussian_expectations",
    "plot_kernel_flow": "plots",
    "plot_strengths": "plots",
    "resolve": "activation_functions",
    "scale_invariant_layer": "closed_flows",
    "strengths": "cutoff",
    "susceptibilities": "criticality",
    "vanishing_kernel_layer": "closed_flows",
    "NearlyKernelRegressor": "nearly_kernel",
    "QuadraticModel": "quadratic",
    "algorithm_matrices": "nearly_kernel",
}

__all__ = list(_NAMES)

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
