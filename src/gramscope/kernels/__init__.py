"""Empirical tangent kernels: layerwise, matrix-free, and of derived outputs."""

from gramscope.kernels.ntk import ntk

__all__ = ["ntk"]
