"""Finite-width theory: recursions, criticality, nearly-kernel machines (PDLT chapter 11). Arrays only."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.theory.activation_functions import Activation as Activation
    from gramscope.theory.activation_functions import Kinked as Kinked
    from gramscope.theory.activation_functions import resolve as resolve
    from gramscope.theory.closed_flows import SingleInput as SingleInput
    from gramscope.theory.closed_flows import scale_invariant_layer as scale_invariant_layer
    from gramscope.theory.closed_flows import vanishing_kernel_layer as vanishing_kernel_layer
    from gramscope.theory.comparison import Comparison as Comparison
    from gramscope.theory.convolution import ConvFlow as ConvFlow
    from gramscope.theory.convolution import FiniteWidthConv1d as FiniteWidthConv1d
    from gramscope.theory.criticality import CriticalPoint as CriticalPoint
    from gramscope.theory.criticality import Susceptibilities as Susceptibilities
    from gramscope.theory.criticality import critical_point as critical_point
    from gramscope.theory.criticality import equivalent_learning_rates as equivalent_learning_rates
    from gramscope.theory.criticality import susceptibilities as susceptibilities
    from gramscope.theory.cubic import CubicKernels as CubicKernels
    from gramscope.theory.cubic import CubicModel as CubicModel
    from gramscope.theory.cutoff import DepthToWidth as DepthToWidth
    from gramscope.theory.cutoff import depth_to_width as depth_to_width
    from gramscope.theory.cutoff import strengths as strengths
    from gramscope.theory.families import GaussianMoments as GaussianMoments
    from gramscope.theory.finite_width import FiniteWidthMLP as FiniteWidthMLP
    from gramscope.theory.finite_width import Flow as Flow
    from gramscope.theory.flow_plots import plot_kernel_flow as plot_kernel_flow
    from gramscope.theory.flow_plots import plot_strengths as plot_strengths
    from gramscope.theory.gaussian_expectations import gaussian_moments as gaussian_moments
    from gramscope.theory.infinite_width import InfiniteWidthKernels as InfiniteWidthKernels
    from gramscope.theory.meta_kernel_validity import MetaKernelConditions as MetaKernelConditions
    from gramscope.theory.meta_kernel_validity import meta_kernel_conditions as meta_kernel_conditions
    from gramscope.theory.nearly_kernel import NearlyKernelRegressor as NearlyKernelRegressor
    from gramscope.theory.nearly_kernel import OutsideRegimeWarning as OutsideRegimeWarning
    from gramscope.theory.quadratic import QuadraticModel as QuadraticModel
    from gramscope.theory.recursions import Layer as Layer
    from gramscope.theory.sampling import ensemble as ensemble
    from gramscope.theory.training_algorithms import algorithm_matrices as algorithm_matrices

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
