"""Tangent kernels: layer by layer, whole, blocked or matrix-free, and how they move under a step (the dNTK)."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.kernels.between_snapshots import snapshot_kernel as snapshot_kernel
    from gramscope.kernels.crossings import KinkCrossings as KinkCrossings
    from gramscope.kernels.crossings import NTKStep as NTKStep
    from gramscope.kernels.crossings import SiteCrossings as SiteCrossings
    from gramscope.kernels.crossings import kink_crossings as kink_crossings
    from gramscope.kernels.crossings import ntk_step as ntk_step
    from gramscope.kernels.ddntk import DDNTK as DDNTK
    from gramscope.kernels.ddntk import DenseDDNTK as DenseDDNTK
    from gramscope.kernels.ddntk import ntk_acceleration as ntk_acceleration
    from gramscope.kernels.ddntk import output_third_order as output_third_order
    from gramscope.kernels.empirical_ntk import ntk as ntk
    from gramscope.kernels.gradients import gradient_gram as gradient_gram
    from gramscope.kernels.jacobian import JacobianOperator as JacobianOperator
    from gramscope.kernels.jacobian import LinearizedModel as LinearizedModel
    from gramscope.kernels.jacobian import NTKOperator as NTKOperator
    from gramscope.kernels.jacobian import linearize as linearize
    from gramscope.kernels.jacobian import ntk_operator as ntk_operator
    from gramscope.kernels.kernel_matrix import Kernel as Kernel
    from gramscope.kernels.kernel_matrix import kernel as kernel
    from gramscope.kernels.kernel_velocity import dntk as dntk
    from gramscope.kernels.kernel_velocity import dntk_velocity as dntk_velocity
    from gramscope.kernels.kernel_velocity import dntk_velocity_operator as dntk_velocity_operator
    from gramscope.kernels.kernel_velocity import output_curvature as output_curvature
    from gramscope.kernels.learning_rates import layer_rates as layer_rates
    from gramscope.kernels.projected import ProjectedTrace as ProjectedTrace
    from gramscope.kernels.projected import projected_trace as projected_trace
    from gramscope.kernels.tangent_kernels import TangentKernels as TangentKernels
    from gramscope.kernels.truncated_training import TruncatedTraining as TruncatedTraining
    from gramscope.kernels.truncated_training import train_truncated as train_truncated

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
