"""Empirical tangent kernels: by weight site, matrix-free, and of derived outputs."""

from gramscope.kernels.kernel import Kernel, kernel
from gramscope.kernels.ntk import ntk
from gramscope.kernels.operator import JacobianOperator, NTKOperator, ntk_operator

__all__ = ["JacobianOperator", "Kernel", "NTKOperator", "kernel", "ntk", "ntk_operator"]
