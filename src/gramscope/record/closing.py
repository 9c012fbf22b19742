"""One line at the end of a run: what was measured when, and what it cost."""

from collections.abc import Mapping, Sequence

from gramscope.record.budget import FREE, GUARANTEED, Budget


def closing_line(
    records: Sequence[Mapping[str, object]], measures: Sequence[str], budget: Budget, left_out: int
) -> str:
    """
    >>> budget = Budget(0.05, started=0.0, spent=1.0, ended=41.0, taken={"loss": 9, "norm": 9, "step": 2})
    >>> records = [{"step": 0}, {"step": 40}]
    >>> print(closing_line(records, ["loss", "norm", "spectra", "step"], budget, 3))
    gramscope: 2 measurements at steps 0 to 40 (loss, norm 9 times, step 2, spectra 0) took 1.0 s, 2.5 % of training; \
3 due steps were left out to keep overhead=0.05.
    """
    times: dict[int, list[str]] = {}
    for name in measures:
        times.setdefault(budget.taken.get(name, 0), []).append(name)
    counts = [f"{', '.join(names)} {count}" for count, names in sorted(times.items(), reverse=True)]
    counts[:1] = [f"{first} times" for first in counts[:1]]
    share = 100 * budget.overhead
    cost = f"{budget.spent:.1f} s, {share:.{share < 10:d}f} % of training"
    line = (
        f"gramscope: {len(records)} measurements at steps {records[0]['step']} to {records[-1]['step']} "
        f"({', '.join(counts) or 'nothing to measure'}) took {cost}"
    )
    if left_out:
        steps = "1 due step was" if left_out == 1 else f"{left_out} due steps were"
        line += f"; {steps} left out to keep overhead={budget.share}"
    if budget.share is not None and share > 100 * budget.share:
        line += f". {_why_more(budget)}"
    return f"{line}."


def _why_more(budget: Budget) -> str:
    """Why a run took more than its share."""
    warm_up = sum(budget.cold.values())
    return (
        f"This is more than overhead={budget.share}, because the run was short ({budget.training_time:.1f} s of "
        f"training): the first {GUARANTEED} measurements, the warm-up of the first ({warm_up:.1f} s) and {FREE:g} s of "
        "measuring are always allowed"
    )
