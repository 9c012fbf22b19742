"""One rule for each family of operations in which a weight meets data. Importing this registers them."""

from gramscope.capture.rules import contraction, convolution, elementwise, lookup, normalisation, recurrent

__all__ = ["contraction", "convolution", "elementwise", "lookup", "normalisation", "recurrent"]
