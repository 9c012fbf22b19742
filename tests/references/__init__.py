"""Slow, obvious, float64: what every fast method is compared with."""
