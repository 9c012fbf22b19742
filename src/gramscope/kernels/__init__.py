"""Tangent kernels: layer by layer, whole, blocked or matrix-free, and how they move under a step (the dNTK)."""

from gramscope.kernels.between_snapshots import snapshot_kernel
from gramscope.kernels.crossings import KinkCrossings, NTKStep, SiteCrossings, kink_crossings, ntk_step
from gramscope.kernels.dntk import (
    NTKVelocityOperator,
    dntk,
    dntk_velocity,
    dntk_velocity_operator,
    output_curvature,
)
from gramscope.kernels.gradients import gradient_gram
from gramscope.kernels.kernel import Kernel, kernel
from gramscope.kernels.linearized_model import LinearizedModel, linearize
from gramscope.kernels.ntk import ntk
from gramscope.kernels.operator import JacobianOperator, NTKOperator, ntk_operator
from gramscope.kernels.projected import ProjectedTrace, projected_trace
from gramscope.kernels.rates import layer_rates
from gramscope.kernels.tangent_kernels import TangentKernels

__all__ = [
    "JacobianOperator",
    "Kernel",
    "KinkCrossings",
    "LinearizedModel",
    "NTKOperator",
    "NTKStep",
    "NTKVelocityOperator",
    "ProjectedTrace",
    "SiteCrossings",
    "TangentKernels",
    "dntk",
    "dntk_velocity",
    "dntk_velocity_operator",
    "gradient_gram",
    "kernel",
    "kink_crossings",
    "layer_rates",
    "linearize",
    "ntk",
    "ntk_operator",
    "ntk_step",
    "output_curvature",
    "projected_trace",
    "snapshot_kernel",
]
