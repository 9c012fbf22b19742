"""Finite-width theory: recursions, criticality, nearly-kernel machines (PDLT chapter 11). Arrays only."""
