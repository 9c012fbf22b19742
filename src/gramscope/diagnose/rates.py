"""How often each finding was right on runs of known faults, held out (benchmarks/diagnosis.py)."""

# kind: (times that it was named first and was right, times that it was named first)
COUNTS: dict[str, tuple[int, int]] = {}


def confidence(kind: str) -> float:
    """Share of right findings, ``(right + 1) / (named + 2)``; NaN for a kind that was never tried.

    >>> confidence("a rule of your own")
    nan
    """
    if kind not in COUNTS:
        return float("nan")
    right, named = COUNTS[kind]
    return (right + 1) / (named + 2)
