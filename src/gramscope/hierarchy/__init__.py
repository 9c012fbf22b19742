"""The hierarchy of layerwise Gram metrics (arXiv:2606.09744): fields, pullback operators, explained steps."""
