"""Spectra of weights: densities, ranks, tail fits."""
